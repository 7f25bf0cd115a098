// The answer first: what it is, how we know, what to do, whether that was tried; then what it is not.

function renderVerdict(run) {
  const { diagnosis, steps } = run.facts;
  const grave = diagnosis.causes.filter((cause) => cause.level !== "note");
  const notes = diagnosis.causes.filter((cause) => cause.level === "note");
  return [
    steps && grave.length ? renderCause(run, grave[0], true) : renderHealthy(run, notes.length),
    grave.length > 1 &&
      h(
        "div",
        { class: "others" },
        h("h3", {}, "Further causes"),
        grave.slice(1).map((cause) => renderFolded(run, cause)),
      ),
    notes.length > 0 &&
      h(
        "div",
        { class: "others" },
        h("h3", {}, "Good to know"),
        notes.map((cause) => renderFolded(run, cause)),
      ),
    h("div", { class: "two" }, renderAlsoSeen(diagnosis), renderExcluded(diagnosis)),
  ];
}

function renderHealthy(run, notes) {
  if (!run.facts.steps) {
    return h(
      "article",
      { class: "verdict card note" },
      h("h1", {}, "No step was recorded"),
      h(
        "p",
        {},
        "There is nothing to say about training: no optimizer took a step while this run was written.",
      ),
    );
  }
  return h(
    "article",
    { class: "verdict card good" },
    h(
      "h1",
      {},
      run.facts.status.ended
        ? "Nothing is wrong that this record could show"
        : "Nothing is wrong so far that this record could show",
    ),
    h(
      "p",
      {},
      `${plural(run.facts.steps, "step")} recorded, ${plural(run.facts.diagnosis.excluded.length, "cause")} tested and excluded`,
      notes ? `; ${plural(notes, "note")} below.` : ".",
    ),
  );
}

function renderCause(run, cause, first) {
  const place = cause.where ? [", at ", h("code", {}, cause.where)] : null;
  return h(
    "article",
    { class: `verdict card ${cause.level}`, "data-cause": cause.id },
    h(
      "p",
      { class: "chips" },
      h("span", { class: `chip level ${cause.level}` }, cause.level),
      h("span", { class: "chip" }, cause.confidence),
      h("code", {}, cause.id),
      cause.step !== null && h("span", { class: "hint" }, `since step ${cause.step}`),
    ),
    h(first ? "h1" : "h3", {}, sentence(cause.title || cause.id), place),
    h(
      "dl",
      {},
      renderEvidence(cause),
      h("div", {}, h("dt", {}, "What to do"), h("dd", { class: "fix" }, withCode(cause.fix))),
    ),
    renderTrial(run, cause),
  );
}

function renderFolded(run, cause) {
  const place = cause.where && h("code", {}, cause.where);
  const summary = h(
    "summary",
    {},
    h("span", { class: `chip level ${cause.level}` }, cause.level),
    sentence(cause.title || cause.id),
    place,
  );
  return foldable(`cause ${cause.id}`, false, { class: `card folded ${cause.level}` }, summary, () => [
    h(
      "p",
      { class: "chips" },
      h("span", { class: "chip" }, cause.confidence),
      h("code", {}, cause.id),
      cause.step !== null && h("span", { class: "hint" }, `step ${cause.step}`),
    ),
    h(
      "dl",
      {},
      renderEvidence(cause),
      h("div", {}, h("dt", {}, "What to do"), h("dd", { class: "fix" }, withCode(cause.fix))),
    ),
    renderTrial(run, cause),
  ]);
}

function renderEvidence(cause) {
  if (!cause.evidence.length) return null;
  return h("div", {}, h("dt", {}, "How we know"), h("dd", {}, renderLines(cause.evidence)));
}

// words that begin a line of the tape's findings
const LABELS = new Set([
  "module",
  "line",
  "because",
  "operand",
  "result",
  "from",
  "reaches",
  "note",
  "at",
  "called",
  "evidence",
  "reproduce",
]);

/** Lines of evidence; those of the tape begin with a word that says what they hold. */
function renderLines(lines) {
  return h(
    "ul",
    { class: "evidence" },
    lines.map((line) => {
      const [word, rest] = [line.split(/\s/, 1)[0], line.replace(/^\S+\s+/, "")];
      const labelled = LABELS.has(word) && /^\S+ {1,}/.test(line) && rest !== line;
      if (!labelled) return h("li", {}, line);
      return h("li", { class: "labelled" }, h("span", { class: "label" }, word), h("code", {}, rest));
    }),
  );
}

/** Text with `code` in it. */
function withCode(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** The fix as it was tried: the loss without and with it. */
function renderTrial(run, cause) {
  const trial = run.facts.trials.find((each) => each.id === cause.id);
  if (!trial) return cause.tried ? h("p", { class: "trial" }, cause.tried) : null;
  const [before, after] = [asNumber(trial.before), asNumber(trial.after)];
  const most = Math.max(...[before, after].filter(Number.isFinite), 1e-30);
  const bar = (label, value, kind) => {
    const fillBar = h("i", { class: kind });
    fillBar.style.width = Number.isFinite(value) ? `${Math.max(1, (100 * value) / most)}%` : "100%";
    return h(
      "div",
      { class: "bar-row" },
      h("span", {}, label),
      h("span", { class: "track" }, fillBar),
      h("b", {}, short(value)),
    );
  };
  return h(
    "div",
    { class: `trial ${trial.helped ? "helped" : "failed"}` },
    h("h4", {}, trial.helped ? "✓ Tried, and it works" : "✕ Tried, and it does not help"),
    h("p", {}, `With ${trial.words}, loss at step ${trial.step}:`),
    bar("as it was", before, "before"),
    bar("with the fix", after, "after"),
  );
}

function renderAlsoSeen(diagnosis) {
  const told = new Set(diagnosis.causes.flatMap((cause) => cause.evidence));
  const text = (symptom) => symptom.evidence + (symptom.step !== null ? ` (step ${symptom.step})` : "");
  const rest = diagnosis.symptoms.filter((symptom) => !told.has(text(symptom)));
  if (!rest.length) return null;
  return h(
    "div",
    { class: "card list" },
    h("h3", {}, "Also seen"),
    h(
      "ul",
      {},
      rest.map((symptom) => h("li", {}, text(symptom))),
    ),
  );
}

function renderExcluded(diagnosis) {
  if (!diagnosis.excluded.length) return null;
  return h(
    "div",
    { class: "card list excluded" },
    h("h3", {}, "Tested, and not the cause"),
    h(
      "dl",
      {},
      diagnosis.excluded.map(({ family, reason }) => h("div", {}, h("dt", {}, family), h("dd", {}, reason))),
    ),
  );
}

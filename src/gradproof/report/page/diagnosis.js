// The answer first: what it is, how we know, what to do, whether that was tried; then what it is not.

function renderVerdict(run) {
  const { diagnosis, steps } = run.facts;
  const grave = diagnosis.causes.filter((cause) => cause.level !== "note");
  const notes = diagnosis.causes.filter((cause) => cause.level === "note");
  return [
    diagnosis.counted && h("p", { class: "hint counted" }, diagnosis.counted),
    diagnosis.stopped && renderStopped(diagnosis),
    steps && grave.length
      ? renderCause(run, grave[0], !diagnosis.stopped)
      : renderHealthy(run, notes.length),
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
    steps > 0 && renderAsked(diagnosis.examination),
  ];
}

function renderStopped({ stopped }) {
  return h("article", { class: "verdict card warning" }, h("h1", {}, stopped));
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
  const { conclusion, stopped, excluded, sure } = run.facts.diagnosis;
  return h(
    "article",
    { class: `verdict card ${sure ? "good" : "note"}` },
    h(stopped ? "h3" : "h1", {}, withCode(conclusion)),
    h(
      "p",
      {},
      `${plural(run.facts.steps, "step")} recorded, ${plural(excluded.length, "cause")} tested and excluded`,
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
      renderFix(cause),
    ),
    renderSource(run, cause),
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
      renderFix(cause),
    ),
    renderSource(run, cause),
    renderTrial(run, cause),
  ]);
}

function renderFix(cause) {
  return [
    h("div", {}, h("dt", {}, "What to do"), h("dd", { class: "fix" }, withCode(cause.fix))),
    h("div", {}, h("dt", {}, "More"), h("dd", {}, h("code", {}, `gradproof explain ${cause.id}`))),
  ];
}

/** The script around the named line, as it ran; the line marked; the fix as a diff where it is certain. */
function renderSource(run, cause) {
  const source = run.facts.sources?.[run.facts.diagnosis.causes.indexOf(cause)];
  if (!source) return null;
  const line = (text, place) => {
    const number = source.first + place;
    return h("li", { value: number, class: number === source.marked ? "marked" : null }, h("code", {}, text || " "));
  };
  const kinds = { "+": "added", "-": "gone", "@": "hint" };
  return h(
    "div",
    { class: "source" },
    h("p", {}, h("code", {}, source.path), copyButton(source.path)),
    source.lines.length > 0 && h("ol", {}, source.lines.map(line)),
    source.diff.length > 0 && [
      h("h4", {}, "The fix"),
      h("ul", { class: "diff" }, source.diff.map((text) => h("li", { class: kinds[text[0]] }, h("code", {}, text || " ")))),
      h("p", { class: "hint" }, h("code", {}, `gradproof fix ${run.facts.path}`), " tries it on a copy."),
    ],
  );
}

/** Puts a text on the clipboard; a frame without the right to is asked in the old way. */
function copyButton(text) {
  const button = h("button", { class: "quiet copy", type: "button" }, "copy path");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      fill(button, "copied");
    } catch {
      const field = button.parentElement.appendChild(h("textarea", { class: "aside", value: text }));
      field.select();
      fill(button, document.execCommand("copy") ? "copied" : "not allowed here");
      field.remove();
    }
  });
  return button;
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

const MOST_OPEN = 40; // questions without an answer that are listed

/** What was asked of the taped steps, and which questions have no answer, with the reason. */
function renderAsked(examination) {
  const open = [
    ...examination.failed.map((each) => ["failed", each]),
    ...examination.undecided.map((each) => ["undecided", each]),
    ...examination.not_asked.map((each) => ["not asked", each]),
  ];
  const entry = ([state, { question, reason, core }]) =>
    h(
      "div",
      {},
      h("dt", {}, `${question} `, core && h("span", { class: "chip" }, "core")),
      h("dd", {}, reason ? `${state}: ${reason}` : state),
    );
  return h(
    "div",
    { class: "card list asked" },
    h("h3", {}, "Asked"),
    h("p", {}, `${sentence(examination.summary)}.`),
    open.length > 0 && h("dl", {}, open.slice(0, MOST_OPEN).map(entry)),
    open.length > MOST_OPEN && h("p", { class: "hint" }, `${open.length - MOST_OPEN} more`),
    examination.command && h("p", {}, h("code", {}, examination.command), " asks the rest."),
  );
}

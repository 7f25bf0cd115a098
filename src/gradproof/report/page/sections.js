// The other parts of a run's page: curves, optimizer, tape, data, environment. Each says so if its part was not recorded.

const missing = (...text) => h("p", { class: "card missing" }, ...text);

// curves ---------------------------------------------------------------------------------------------------------

function renderCurves(run, view) {
  const { marks, spikes } = run.facts;
  const several = new Set(run.curves.map((curve) => curve.track)).size > 1;
  const lines = (id, styles = {}) =>
    run.curvesOf(id).map((curve, place) => ({
      ...curve,
      label: several && curve.track ? `${curve.track}: ${curve.label}` : curve.label,
      color: ["curve", "curve-2", "curve-3"][place % 3],
      ...styles,
    }));
  const plots = [];
  const add = (title, parts, options) => {
    const all = parts.flat();
    if (all.length) plots.push(new Plot(view, all, { title, marks, ...options }).element);
  };
  const smoothed = lines("loss_smooth", { width: 2 });
  const raw = lines("loss", smoothed.length ? { alpha: 0.4, width: 1 } : {});
  const jumps = spikes.length && [{ label: "spikes", steps: spikes.map((s) => s.step), values: spikes.map((s) => s.value), color: "warning", width: 0, points: true }];
  add("Loss", [raw, smoothed, jumps || []], { log: false, height: 220, hint: thinnedHint(run.curvesOf("loss")) });
  add("Learning rate", [lines("lr")], { log: false });
  const before = lines("norm_before_clip", { color: "curve-2", alpha: 0.9 });
  add("Gradient norm", [before, lines("grad_norm"), lines("clip_limit", { color: "faint", dash: [5, 4], width: 1 })], { log: true });
  add("Clip rate", [lines("clip_rate")], { zeroToOne: true });
  add("Update / weight", [lines("update_ratio", { points: run.curvesOf("update_ratio").some((c) => c.steps.length < 60) })], { log: true });
  add("Cosine of successive gradients", [lines("cosine", { points: run.curvesOf("cosine").some((c) => c.steps.length < 60) })], {});
  add("Loss scale", [lines("loss_scale")], { log: true });
  run.curvesOf("noted").forEach((curve) => add(visible(curve.label), [[{ ...curve, color: "curve-3", points: curve.steps.length < 60 }]], { log: false, hint: "noted by the script" }));
  return plots.length ? h("div", { class: "plots" }, plots) : missing("No curve was recorded.");
}

function thinnedHint(curves) {
  const all = curves.reduce((sum, curve) => sum + curve.of, 0);
  const kept = curves.reduce((sum, curve) => sum + curve.steps.length, 0);
  return kept < all ? `${kept.toLocaleString("en")} of ${all.toLocaleString("en")} points; the lowest and highest of every stretch are kept` : null;
}

// optimizer ------------------------------------------------------------------------------------------------------

function renderOptimizer(run, onPick) {
  const optimizers = run.facts.info.optimizers || [];
  if (!optimizers.length) return missing("No optimizer was seen: its settings and state are not recorded.");
  const moments = run.ofKind("adam_v");
  return [
    optimizers.map((optimizer) =>
      h(
        "div",
        { class: "card" },
        h("h3", {}, optimizer.class || "optimizer", optimizer.name ? h("small", {}, ` ${optimizer.name}`) : null, optimizer.line ? h("small", {}, ` ${optimizer.line}`) : null),
        (optimizer.groups || []).map((group, place) => renderFacts(group, optimizer.groups.length > 1 ? `group ${place}` : null)),
      ),
    ),
    moments.length ? renderMoments(run, moments, onPick) : missing("Adam's moments were not measured. They are at depth “optimizer”: gradproof run --schedule 'optimizer every 10th step' SCRIPT"),
  ];
}

/** Of each parameter: how large m and √v were last, how far a step goes, and where ε decides instead of √v. */
function renderMoments(run, moments, onPick) {
  const rows = moments
    .map((number) => {
      const name = run.tensors[number].name;
      const m = run.number("adam_m", name);
      const rootMean = Math.sqrt(Math.abs(run.lastOf(number, "mean")));
      const size = m === undefined ? NaN : Math.hypot(run.lastOf(m, "mean"), run.lastOf(m, "std"));
      return { number, name, m: size, v: rootMean, ratio: size / rootMean, eps: run.lastOf(number, "eps_share"), step: run.last.steps[number] };
    })
    .sort((a, b) => (b.eps || 0) - (a.eps || 0));
  const shown = rows.slice(0, 200);
  return h(
    "div",
    { class: "card" },
    h("h3", {}, "Adam's state"),
    h(
      "div",
      { class: "scroll short" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ["parameter", "RMS of m", "√ mean v", "m / √v", "ε outweighs √v", "at step"].map((each) => h("th", { scope: "col" }, each)))),
        h("tbody", {}, shown.map((row) => h("tr", { onclick: () => onPick(row.number, null) }, h("th", { scope: "row" }, h("button", { class: "name" }, row.name)), [short(row.m), short(row.v), short(row.ratio), percent(row.eps), row.step].map((each) => h("td", {}, each))))),
      ),
    ),
    rows.length > shown.length && h("p", { class: "hint" }, `the first ${shown.length} of ${rows.length}; all are in the table of tensors`),
  );
}

// tape -----------------------------------------------------------------------------------------------------------

function renderTape(run) {
  const { verdicts, shadow } = run.facts;
  const asked = verdicts.length || shadow;
  if (!asked) return missing("No step of this run was taped. gradproof run SCRIPT tapes the first steps and some later ones; --until STEP tapes the one you want.");
  const born = verdicts.find((each) => each.experiment === "where_was_it_born" && each.verdict === "confirmed");
  return [born && renderFirstBad(born), shadow && renderShadow(shadow), renderQuestions(verdicts)];
}

function renderFirstBad(verdict) {
  return h(
    "div",
    { class: "card" },
    h("h3", {}, "The first bad operation", h("small", {}, ` step ${verdict.step}`)),
    verdict.where && h("p", {}, h("code", {}, verdict.where)),
    renderLines(verdict.evidence),
  );
}

/** The error of each parameter's gradient against float64, with what rounding allows. */
function renderShadow(shadow) {
  const size = (p) => asNumber(p.error);
  const judged = [...shadow.parameters].sort((a, b) => (size(b) || 0) - (size(a) || 0));
  const place = (value) => Math.max(0, Math.min(100, (100 * (Math.log10(Math.max(value, 1e-17)) + 17)) / 18));
  const rows = judged.slice(0, 100).map((p) => {
    const right = p.verdict === "right" || p.verdict === "zero in truth";
    const bar = h("i", { class: right ? "after" : "before" });
    bar.style.width = `${place(size(p))}%`;
    const limit = h("em");
    limit.style.left = `${place(asNumber(p.tolerance))}%`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, p.name),
      h("td", { class: right ? "good" : "bad" }, p.verdict),
      h("td", {}, short(p.error)),
      h("td", { class: "wide" }, short(p.tolerance)),
      h("td", { class: "errors wide" }, h("span", { class: "track" }, bar, limit)),
      h("td", { class: "wide" }, p.pattern),
    );
  });
  return h(
    "div",
    { class: "card" },
    h("h3", {}, "Every gradient against float64", h("small", {}, ` step ${shadow.step}`)),
    h("p", { class: "hint" }, `loss ${short(shadow.loss)}, in float64 ${short(shadow.true_loss)}; relative error of each gradient, worst first, and what rounding allows`),
    h("div", { class: "scroll short" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "parameter"), h("th", {}, ""), h("th", {}, "error"), h("th", { class: "wide" }, "allowed"), h("th", { class: "wide" }, "10⁻¹⁷ … 10"), h("th", { class: "wide" }, ""))), h("tbody", {}, rows))),
    judged.length > 100 && h("p", { class: "hint" }, `the worst 100 of ${judged.length}`),
    (shadow.notes || []).map((note) => h("p", { class: "hint" }, note)),
  );
}

/** What each experiment was asked and what it answered last. */
function renderQuestions(verdicts) {
  if (!verdicts.length) return null;
  const order = { confirmed: 0, undecided: 1, excluded: 2 };
  const sorted = [...verdicts].sort((a, b) => order[a.verdict] - order[b.verdict]);
  return h(
    "div",
    { class: "card" },
    h("h3", {}, "Asked of the taped steps"),
    h("dl", { class: "questions" }, sorted.map((each) =>
      h("div", {}, h("dt", {}, `${sentence((each.experiment || "").replaceAll("_", " "))}?`),
        h("dd", {}, h("span", { class: `chip ${each.verdict}` }, each.verdict), h("code", {}, each.id || each.family), " ", each.reason || (each.evidence || [])[0] || "", h("small", {}, ` step ${each.step}`))))),
  );
}

// data -----------------------------------------------------------------------------------------------------------

function renderData(run) {
  const { alignment, verdicts } = run.facts;
  const about = verdicts.filter((each) => ["data-target-misaligned", "data-order-or-sampling", "loss-mask-error", "input-or-target-scale"].includes(each.family));
  const words = about.length > 0 && h("div", { class: "card" }, h("h3", {}, "What the taped batches say"), h("dl", { class: "questions" }, about.map((each) => h("div", {}, h("dt", {}, each.family), h("dd", {}, h("span", { class: `chip ${each.verdict}` }, each.verdict), each.reason || (each.evidence || [])[0] || "")))));
  if (!alignment) return [missing("No table of lags: it is made where token sequences and their targets are seen on a taped step."), words];
  const rows = alignment.shares.map(([lag, share]) => {
    const bar = h("i", { class: lag === 1 ? "after" : "before" });
    bar.style.width = `${100 * share}%`;
    const meaning = { "-1": "the token before", 0: "the same token", 1: "the next token: what a language model predicts", 2: "the token after next" }[lag] || "";
    return h("tr", {}, h("th", { scope: "row" }, lag > 0 ? `+${lag}` : String(lag).replace("-", "−")), h("td", {}, percent(share)), h("td", { class: "errors" }, h("span", { class: "track" }, bar)), h("td", { class: "wide" }, meaning));
  });
  return [
    h("div", { class: "card" }, h("h3", {}, "How far the targets are ahead of the inputs", h("small", {}, ` step ${alignment.step}`)), h("table", { class: "lags" }, h("thead", {}, h("tr", {}, ["positions ahead", "of the targets", "", ""].map((each, i) => h("th", { class: i === 3 && "wide" }, each)))), h("tbody", {}, rows)), alignment.where && h("p", { class: "hint" }, alignment.where)),
    words,
  ];
}

// environment ----------------------------------------------------------------------------------------------------

function renderFacts(facts, title) {
  const show = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value === "object") return JSON.stringify(value);
    return String(value);
  };
  return [title && h("h4", {}, title), h("dl", { class: "facts-list" }, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, show(value)))))];
}

function renderEnvironment(run) {
  const { info, notes, path } = run.facts;
  const time = (seconds) => (seconds ? new Date(1000 * seconds).toISOString().replace("T", " ").slice(0, 19) + " UTC" : null);
  const about = {
    command: (info.command || []).join(" "),
    directory: info.directory,
    run: path,
    began: time(info.began),
    ended: time(info.ended) || "not recorded",
    "exit code": info.exit_code,
    rank: info.world > 1 ? `${info.rank} of ${info.world}` : undefined,
    schedule: info.schedule,
    ...info.versions,
    commit: info.source?.commit,
    "script's sha256": info.source?.sha256,
  };
  const known = Object.fromEntries(Object.entries(about).filter(([, value]) => value !== undefined && value !== null && value !== ""));
  return [
    h("div", { class: "card" }, h("h3", {}, "What ran, on what"), renderFacts(known)),
    info.cost && h("div", { class: "card" }, h("h3", {}, "What watching cost"), renderFacts({
      watching: `${short(info.cost.own_seconds)} s, ${percent(info.cost.share)} of the wall time`,
      "taped steps": info.cost.taped_steps,
      "taping and testing": `${short(info.cost.experiment_seconds)} s`,
      "steps with loss and learning rate only": info.cost.bare_steps,
      "steps not looked at": info.cost.unseen_steps,
    })),
    notes.length > 0 && h("div", { class: "card" }, h("h3", {}, "What could not be read"), h("ul", {}, notes.map((note) => h("li", {}, note)))),
  ];
}

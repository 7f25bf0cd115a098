// The surroundings of a run: its optimizers and their state, what ran on what, what watching cost.

function renderOptimizer(run, onPick) {
  const optimizers = run.facts.info.optimizers || [];
  if (!optimizers.length) return missing("No optimizer was seen: its settings and state are not recorded.");
  const moments = run.ofKind("adam_v");
  return [
    optimizers.map((optimizer) =>
      h(
        "div",
        { class: "card" },
        h(
          "h3",
          {},
          optimizer.class || "optimizer",
          optimizer.name ? h("small", {}, ` ${optimizer.name}`) : null,
          optimizer.line ? h("small", {}, ` ${optimizer.line}`) : null,
        ),
        (optimizer.groups || []).map((group, place) =>
          renderFacts(group, optimizer.groups.length > 1 ? `group ${place}` : null),
        ),
      ),
    ),
    moments.length
      ? renderMoments(run, moments, onPick)
      : missing(
          "Adam's moments were not measured. They are at depth “optimizer”: gradproof run --schedule 'optimizer every 10th step' SCRIPT",
        ),
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
      return {
        number,
        name,
        m: size,
        v: rootMean,
        ratio: size / rootMean,
        eps: run.lastOf(number, "eps_share"),
        step: run.last.steps[number],
      };
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
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["parameter", "RMS of m", "√ mean v", "m / √v", "ε outweighs √v", "at step"].map((each) =>
              h("th", { scope: "col" }, each),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          shown.map((row) =>
            h(
              "tr",
              { onclick: () => onPick(row.number, null) },
              h("th", { scope: "row" }, h("button", { class: "name" }, row.name)),
              [short(row.m), short(row.v), short(row.ratio), percent(row.eps), row.step].map((each) =>
                h("td", {}, each),
              ),
            ),
          ),
        ),
      ),
    ),
    rows.length > shown.length &&
      h(
        "p",
        { class: "hint" },
        `the first ${shown.length} of ${rows.length}; all are in the table of tensors`,
      ),
  );
}

function renderFacts(facts, title) {
  const show = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value === "object") return JSON.stringify(value);
    return String(value);
  };
  return [
    title && h("h4", {}, title),
    h(
      "dl",
      { class: "facts-list" },
      Object.entries(facts).map(([name, value]) =>
        h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, show(value))),
      ),
    ),
  ];
}

function renderEnvironment(run) {
  const { info, notes, path } = run.facts;
  const time = (seconds) =>
    seconds ? new Date(1000 * seconds).toISOString().replace("T", " ").slice(0, 19) + " UTC" : null;
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
  const known = Object.fromEntries(
    Object.entries(about).filter(([, value]) => value !== undefined && value !== null && value !== ""),
  );
  return [
    h("div", { class: "card" }, h("h3", {}, "What ran, on what"), renderFacts(known)),
    info.cost &&
      h(
        "div",
        { class: "card" },
        h("h3", {}, "What watching cost"),
        renderFacts({
          watching: `${short(info.cost.own_seconds)} s, ${percent(info.cost.share)} of the wall time`,
          "taped steps": info.cost.taped_steps,
          "taping and testing": `${short(info.cost.experiment_seconds)} s`,
          "steps with loss and learning rate only": info.cost.bare_steps,
          "steps not looked at": info.cost.unseen_steps,
        }),
      ),
    notes.length > 0 &&
      h(
        "div",
        { class: "card" },
        h("h3", {}, "What could not be read"),
        h(
          "ul",
          {},
          notes.map((note) => h("li", {}, note)),
        ),
      ),
  ];
}

// The surroundings of a run: its optimizers and their state, what ran on what, what watching cost.

function renderOptimizer(run, onPick) {
  const optimizers = run.facts.info.optimizers || [];
  if (!optimizers.length) return missing("No optimizer was seen: its settings and state are not recorded.");
  const moments = run.ofKind("adam_v");
  return [
    optimizers.map((optimizer) =>
      card(
        h(
          "h3",
          {},
          optimizer.class || "optimizer",
          [optimizer.name, optimizer.line]
            .filter((each) => each && each !== optimizer.class)
            .map((each) => h("small", {}, ` ${each}`)),
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

const MOST_MOMENTS = 200;

/** Of each parameter: how large m and √v were last, how far a step goes, and where ε decides instead of √v. */
function renderMoments(run, moments, onPick) {
  const share = (number) => run.lastOf(number, "eps_share") || 0;
  const sorted = [...moments].sort((a, b) => share(b) - share(a));
  const rows = sorted.slice(0, MOST_MOMENTS).map((number) => {
    const { name } = run.tensors[number];
    const first = run.number("adam_m", name);
    const m = first === undefined ? NaN : Math.hypot(run.lastOf(first, "mean"), run.lastOf(first, "std"));
    const root = Math.sqrt(Math.abs(run.lastOf(number, "mean")));
    const cells = [m, root, m / root].map(short);
    return row(
      h("button", { class: "name" }, name),
      [...cells, percent(run.lastOf(number, "eps_share")), run.last.steps[number]],
      { onclick: () => onPick(number, null) },
    );
  });
  const heads = ["parameter", "RMS of m", "√ mean v", "m / √v", "ε outweighs √v", "at step"];
  return card(
    h("h3", {}, "Adam's state"),
    h("div", { class: "scroll short" }, table(heads, rows)),
    moments.length > rows.length &&
      h("p", { class: "hint" }, `${rows.length} of ${moments.length}; all are in the table of tensors`),
  );
}

function renderFacts(facts, title) {
  const show = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value === "object") return JSON.stringify(value);
    return typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value);
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
    "fix applied from outside": info.fix,
    ...info.versions,
    commit: info.source?.commit,
    "script's sha256": info.source?.sha256,
  };
  const known = Object.fromEntries(
    Object.entries(about).filter(([, value]) => value !== undefined && value !== null && value !== ""),
  );
  return [
    card(h("h3", {}, "What ran, on what"), renderFacts(known)),
    info.cost &&
      card(
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
      card(
        h("h3", {}, "What could not be read"),
        h(
          "ul",
          {},
          notes.map((note) => h("li", {}, note)),
        ),
      ),
  ];
}

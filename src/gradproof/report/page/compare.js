// Two or more runs: curves on top of each other, health side by side, and what was changed between them.

const RUN_COLORS = ["curve", "curve-2", "curve-3", "curve-4", "curve-5"];

function renderComparison(runs, comparison, onOpen) {
  const range = [Math.min(...runs.map((run) => run.range[0])), Math.max(...runs.map((run) => run.range[1]))];
  const view = new View(range);
  const labels = comparison.labels;
  return {
    view,
    nodes: [
      section("verdict", "Side by side", renderHealthTable(comparison, runs, onOpen)),
      section("curves", "Curves", renderOverlays(runs, labels, view)),
      section("findings", "Difference of health", renderFindings(comparison)),
      section("changes", "What was changed", renderChanges(comparison), renderCode(comparison)),
      section("tensors", "Tensors that differ most", renderTensorDifferences(comparison)),
    ],
  };
}

function runLabel(label, place) {
  const dot = h("i", { class: "swatch" });
  dot.style.setProperty("--c", color(RUN_COLORS[place % RUN_COLORS.length]));
  return [dot, label];
}

function renderHealthTable(comparison, runs, onOpen) {
  const head = ["run", "verdict", "steps", "first loss", "last loss", "best loss", "parts from the first at"];
  const rows = comparison.health.map((health, place) => {
    const level = health.worst || "good";
    const apart = comparison.apart_since[place];
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, h("button", { class: "name", onclick: () => onOpen(runs[place], place) }, runLabel(comparison.labels[place], place))),
      h("td", {}, h("span", { class: `chip level ${level}` }, level), " ", health.title ? sentence(health.title) : "nothing found", health.where && [" at ", h("code", {}, health.where)]),
      [health.steps, short(health.first_loss), short(health.last_loss), short(health.best_loss)].map((value) => h("td", {}, value)),
      h("td", {}, place === 0 ? "" : apart === null ? "nowhere: the same losses" : `step ${apart}`),
    );
  });
  return h("div", { class: "card scroll" }, h("table", { class: "health" }, h("thead", {}, h("tr", {}, head.map((each) => h("th", { scope: "col" }, each)))), h("tbody", {}, rows)));
}

function renderOverlays(runs, labels, view) {
  const overlay = (title, id, options) => {
    const lines = runs.flatMap((run, place) =>
      run.curvesOf(id).map((curve) => ({ ...curve, label: labels[place] + (curve.track ? ` ${curve.track}` : ""), color: RUN_COLORS[place % RUN_COLORS.length] })));
    return lines.length ? new Plot(view, lines, { title, ...options }).element : null;
  };
  const smooth = runs.every((run) => run.curvesOf("loss_smooth").length);
  return h(
    "div",
    { class: "plots" },
    overlay(smooth ? "Loss, smoothed" : "Loss", smooth ? "loss_smooth" : "loss", { log: false, height: 220 }),
    overlay("Learning rate", "lr", { log: false }),
    overlay("Gradient norm before the clip", "norm_before_clip", { log: true }),
    overlay("Gradient norm that the optimizer saw", "grad_norm", { log: true }),
    overlay("Clip rate", "clip_rate", { zeroToOne: true }),
    overlay("Update / weight", "update_ratio", { log: true }),
  );
}

/** A table with a column for each run. */
function renderTable(comparison, first, rows) {
  return h("div", { class: "card scroll" }, h("table", { class: "changes" }, h("thead", {}, h("tr", {}, h("th", {}, first), comparison.labels.map((label, place) => h("th", { scope: "col" }, runLabel(label, place))))), h("tbody", {}, rows)));
}

function renderFindings(comparison) {
  if (!comparison.findings.length) return missing("No cause was found in any of the runs.");
  return renderTable(comparison, "cause", comparison.findings.map((row) =>
    h("tr", {}, h("th", { scope: "row" }, h("code", {}, row.id)), row.levels.map((level, place) =>
      h("td", {}, level ? [h("span", { class: `chip level ${level}` }, level), " ", row.where[place] && h("code", {}, row.where[place])] : h("span", { class: "hint" }, "not found"))))));
}

function renderChanges(comparison) {
  if (!comparison.differences.length) return missing("Code, arguments, versions and settings are the same, as far as they were recorded.");
  return renderTable(comparison, "what", comparison.differences.slice(0, 100).map((difference) =>
    h("tr", {}, h("th", { scope: "row" }, h("small", {}, difference.group), " ", difference.what), difference.values.map((value) => h("td", {}, value === null ? h("span", { class: "hint" }, "–") : h("code", {}, value))))));
}

function renderCode(comparison) {
  return comparison.code.map((diff, place) => {
    if (!diff) return null;
    const lines = diff.split("\n").map((line) => h("span", { class: { "+": "added", "-": "removed", "@": "hunk" }[line[0]] || "" }, line || " "));
    return h("details", { class: "card", open: true }, h("summary", {}, "Script of ", comparison.labels[place], " against ", comparison.labels[0]), h("pre", { class: "diff" }, lines));
  });
}

function renderTensorDifferences(comparison) {
  if (!comparison.tensors.length) return missing("No gradient or update that all runs measured differs by a factor of two.");
  return renderTable(comparison, "typical norm", comparison.tensors.map((each) =>
    h("tr", {}, h("th", { scope: "row" }, each.name, " ", h("small", {}, KIND_WORDS[each.kind] || each.kind)), each.values.map((value) => h("td", {}, short(value))))));
}

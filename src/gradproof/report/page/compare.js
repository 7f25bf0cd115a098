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
  const heads = [
    "run",
    "verdict",
    "steps",
    "first loss",
    "last loss",
    "best loss",
    "parts from the first at",
  ];
  const rows = comparison.health.map((health, place) => {
    const label = runLabel(comparison.labels[place], place);
    const apart = comparison.apart_since[place];
    return row(h("button", { class: "name", onclick: () => onOpen(runs[place], place) }, label), [
      [
        (health.worst || health.complete) && levelChip(health.worst || "good"),
        health.title ? sentence(health.title) : "nothing found",
        health.where && [" at ", h("code", {}, health.where)],
      ],
      health.steps,
      short(health.first_loss),
      short(health.last_loss),
      short(health.best_loss),
      place === 0 ? "" : apart === null ? "nowhere: the same losses" : `step ${apart}`,
    ]);
  });
  return h("div", { class: "card scroll" }, table(heads, rows, { class: "health" }));
}

const levelChip = (level) => [h("span", { class: `chip level ${level}` }, level), " "];

function renderOverlays(runs, labels, view) {
  const overlay = (title, id, options) => {
    const lines = runs.flatMap((run, place) =>
      run.curvesOf(id).map((curve) => ({
        ...curve,
        label: labels[place] + (curve.track ? ` ${curve.track}` : ""),
        color: RUN_COLORS[place % RUN_COLORS.length],
      })),
    );
    return lines.length ? new Plot(view, lines, { title, ...options }).element : null;
  };
  const smooth = runs.every((run) => run.curvesOf("loss_smooth").length);
  return h(
    "div",
    { class: "plots" },
    overlay(smooth ? "Loss, smoothed" : "Loss", smooth ? "loss_smooth" : "loss", {
      log: "auto",
      height: 220,
    }),
    overlay("Learning rate", "lr", { log: false }),
    overlay("Gradient norm before the clip", "norm_before_clip", { log: true }),
    overlay("Gradient norm that the optimizer saw", "grad_norm", { log: true }),
    overlay("Clip rate", "clip_rate", { zeroToOne: true }),
    overlay("Update / weight", "update_ratio", { log: true }),
  );
}

/** A table with a column for each run. */
function renderTable(comparison, first, rows) {
  const heads = [first, ...comparison.labels.map((label, place) => h("span", {}, runLabel(label, place)))];
  return h("div", { class: "card scroll" }, table(heads, rows, { class: "changes" }));
}

function renderFindings(comparison) {
  if (!comparison.findings.length) return missing("No cause was found in any of the runs.");
  const rows = comparison.findings.map(({ id, levels, where }) => {
    const cells = levels.map((level, place) =>
      level
        ? [levelChip(level), where[place] && h("code", {}, where[place])]
        : h("span", { class: "hint" }, "not found"),
    );
    return row(h("code", {}, id), cells);
  });
  return renderTable(comparison, "cause", rows);
}

const MOST_CHANGES = 100;

function renderChanges(comparison) {
  const { differences } = comparison;
  if (!differences.length)
    return missing("Code, arguments, versions and settings are the same, as far as they were recorded.");
  const rows = differences.slice(0, MOST_CHANGES).map(({ group, what, values }) => {
    const cells = values.map((value) =>
      value === null ? h("span", { class: "hint" }, "–") : h("code", {}, value),
    );
    return row([h("small", {}, group), " ", what], cells);
  });
  const left = differences.length - rows.length;
  return [renderTable(comparison, "what", rows), left > 0 && missing(`and ${left} more differences`)];
}

function renderCode(comparison) {
  const kinds = { "+": "added", "-": "removed", "@": "hunk" };
  return comparison.code.map((diff, place) => {
    if (!diff) return null;
    const [first, other] = [comparison.labels[0], comparison.labels[place]];
    const lines = diff.split("\n").slice(2); // the first two name the runs, as the summary does
    return foldable(
      `code ${place}`,
      true,
      { class: "card" },
      h("summary", {}, `Script of ${other} against ${first}`),
      () =>
        h(
          "pre",
          { class: "diff" },
          lines.map((line) => h("span", { class: kinds[line[0]] }, line || " ")),
        ),
    );
  });
}

function renderTensorDifferences(comparison) {
  if (!comparison.tensors.length)
    return missing("No gradient or update that all runs measured differs by a factor of two.");
  const rows = comparison.tensors.map(({ name, kind, values }) =>
    row([name, " ", h("small", {}, KIND_WORDS[kind] || kind)], values.map(short)),
  );
  return renderTable(comparison, "typical norm", rows);
}

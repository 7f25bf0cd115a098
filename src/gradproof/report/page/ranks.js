// The ranks of one training: a small curve of each, how far each is from the others, who is slow, where one stands.

const RANK_WIDTH = 180;
const RANK_HEIGHT = 44;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(document.getElementById("empty").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  append(element, children);
  return element;
}

/** One line in a small picture; `low` and `high` are the same for all ranks, so that they can be compared by eye. */
function smallCurve(values, low, high, label) {
  const x = (index) => (RANK_WIDTH * index) / Math.max(1, values.length - 1);
  const y = (value) => 2 + (RANK_HEIGHT - 4) * (1 - (value - low) / (high - low || 1));
  let path = "";
  values.forEach((value, index) => {
    if (value !== null) path += `${path && values[index - 1] !== null ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return svg(
    "svg",
    { viewBox: `0 0 ${RANK_WIDTH} ${RANK_HEIGHT}`, class: "rank-curve", role: "img", "aria-label": label },
    svg("path", { d: path || "M0 0" }),
  );
}

function rangeOf(ranks, name) {
  const known = ranks.flatMap((each) => each[name].filter((value) => value !== null));
  return known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
}

/** Rank × step: the darker, the farther from what most ranks have; nothing is drawn where they agree to 1e-6. */
function differenceMap({ ranks, steps }) {
  const cells = ranks.flatMap((each, line) =>
    each.away.map((value, column) => {
      if (value === null || value < 1e-6) return null;
      const shade = Math.min(1, 0.25 + (Math.log10(value) + 6) / 8);
      return svg(
        "rect",
        { x: column, y: line + 0.05, width: 1, height: 0.9, "fill-opacity": shade.toFixed(2) },
        svg("title", {}, `rank ${each.rank}, step ${steps[column]}: ${short(100 * value)} % from the others`),
      );
    }),
  );
  const label = "rank × step: how far weights and gradients of each rank are from those of the others";
  const box = `0 0 ${steps.length} ${ranks.length}`;
  const map = svg("svg", { viewBox: box, preserveAspectRatio: "none", class: "rank-map", role: "img", "aria-label": label }, cells.filter(Boolean));
  map.style.height = `${18 * ranks.length}px`;
  return h(
    "div",
    { class: "rank-grid" },
    h("div", { class: "rank-names" }, ranks.map((each) => h("span", {}, `rank ${each.rank}`))),
    map,
    h("span"),
    h("div", { class: "rank-steps" }, h("span", {}, `step ${steps[0]}`), h("span", {}, `step ${steps[steps.length - 1]}`)),
  );
}

/** In words: who there is, who is slow, who is not like the others. */
function aboutRanks(found) {
  const apart = found.ranks.filter((each) => each.away.some((value) => value > 1e-6));
  const since = (each) => `rank ${each.rank} (first at step ${found.steps[each.away.findIndex((value) => value > 1e-6)]})`;
  const slow = found.slowest;
  const alike = found.compared
    ? "weights and gradients are alike on all ranks, at every step that was compared"
    : "each rank holds a part of the model: their weights and gradients are not meant to be alike, and are not compared";
  return [
    `${found.world} ranks` + (found.missing.length ? `; no record of ${found.missing.join(", ")}` : ""),
    slow && `slowest: rank ${slow.rank}, ${short(1000 * slow.own)} ms from the begin of a step to its backward (the others: ${short(1000 * slow.others)} ms)`,
    apart.length ? `not like the others: ${apart.map(since).join(", ")}` : alike,
  ].filter(Boolean);
}

function renderRanks(run) {
  const found = run.facts.ranks;
  if (!found) return null;
  const { ranks } = found;
  const [lowLoss, highLoss] = rangeOf(ranks, "loss");
  const [lowNorm, highNorm] = rangeOf(ranks, "gradient");
  const norm = found.compared ? "gradient norm" : "gradient norm, from its part";
  return [
    card(aboutRanks(found).map((line) => h("p", {}, line))),
    ranks.some((each) => each.away.some((value) => value > 1e-6)) &&
      card(
        h("h3", {}, "Rank × step"),
        differenceMap(found),
        h("p", { class: "hint" }, "Red: weights or gradients are not those of the other ranks; the darker, the farther (a millionth to all of it). Point at a cell for its number."),
      ),
    card(
      table(
        ["rank", `loss, ${short(lowLoss)} to ${short(highLoss)}`, `${norm}, ${short(lowNorm)} to ${short(highNorm)}`, "last whole step", "now"],
        ranks.map((each) =>
          row(String(each.rank), [
            h("td", {}, smallCurve(each.loss, lowLoss, highLoss, `loss of rank ${each.rank}`)),
            h("td", {}, smallCurve(each.gradient, lowNorm, highNorm, `gradient norm of rank ${each.rank}`)),
            each.last < 0 ? "none" : String(each.last),
            each.now,
          ]),
        ),
      ),
    ),
  ];
}

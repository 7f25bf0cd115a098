// One tensor looked at closely: its statistics at a step, its size over the run, the exponents of its entries.

/** The panel about one tensor at one step (the last measured one if none is given). */
function renderTensor(run, view, number, step, onPick, onClose) {
  const tensor = run.tensors[number];
  const at = step ?? run.last.steps[number];
  return h(
    "aside",
    { class: "panel", "aria-label": "one tensor", tabindex: "-1" },
    h("button", { class: "quiet close", title: "close (Esc)", onclick: onClose }, "✕"),
    h("h2", {}, tensor.name),
    h(
      "p",
      { class: "facts" },
      [KIND_WORDS[tensor.kind] || tensor.kind, tensor.module, shapeOf(run, tensor), tensor.dtype]
        .filter(Boolean)
        .join(" · "),
    ),
    h(
      "p",
      { class: "kinds" },
      siblingsOf(run, number).map(([other, label]) =>
        h(
          "button",
          { class: other === number ? "chip on" : "chip", onclick: () => onPick(other, at) },
          label,
        ),
      ),
    ),
    renderMoment(run, number, at),
    renderSizePlot(run, view, number, at),
    renderExponents(run, number),
  );
}

function shapeOf(run, tensor) {
  const shape = tensor.shape || run.parameter(tensor.name)?.shape;
  return shape && (shape.length ? shape.join(" × ") : "one number");
}

/** The same parameter's or module's other tensors. */
function siblingsOf(run, number) {
  const { name, kind } = run.tensors[number];
  const same = Object.keys(KIND_WORDS).map((each) => [run.number(each, name), KIND_WORDS[each]]);
  if (!kind.startsWith("output")) {
    const module = name.slice(0, Math.max(0, name.lastIndexOf(".")));
    same.push([run.number("output", module), `output of ${module.split(".").pop()}`]);
  }
  return same.filter(([other]) => other !== undefined);
}

/** Statistics at a step: exact where it is the last measured one, else of the stretch around it. */
function renderMoment(run, number, step) {
  const exact = run.last.steps[number] === step;
  const { history, details } = run;
  const rows = [];
  const bin = placeOf(history.first, step);
  const flags = history.bins ? history.bad[number * history.bins + bin] : 0;
  if (exact) {
    for (const name of run.last.names) {
      const value = run.lastOf(number, name);
      if (!Number.isNaN(value)) rows.push([name.replace("_", " "), short(value)]);
    }
  } else if (history.bins) {
    const [low, high] = [history.low, history.high].map((plane) => plane[number * history.bins + bin]);
    const size = run.tensors[number].kind.startsWith("output") ? "RMS" : "norm";
    rows.push([
      size,
      high === NOT_MEASURED
        ? "not measured here"
        : low < high
          ? `${short(low)} to ${short(high)}`
          : short(high),
    ]);
    const near = placeOf(details.first, step);
    for (const name of details.names) {
      const value = run.detail(name, number, near);
      const label = name === "extra" ? details.extra[run.tensors[number].kind] : name;
      if (!Number.isNaN(value) && label) rows.push([label.replace("_", " "), short(value)]);
    }
  }
  const stretch = !exact && history.bins && history.first[bin] !== history.last[bin];
  const head = stretch ? `steps ${history.first[bin]} to ${history.last[bin]}` : `step ${step}`;
  return h(
    "div",
    { class: "moment" },
    h("h3", { "data-step": step }, step < 0 ? "never measured" : head),
    flags ? h("p", { class: "bad" }, `holds ${badWords(flags)}`) : null,
    h(
      "dl",
      {},
      rows.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value))),
    ),
    !exact && rows.length
      ? h(
          "p",
          { class: "hint" },
          "the page keeps histories to 8 bits, 0.4 %; the last measured step is exact",
        )
      : null,
  );
}

function renderSizePlot(run, view, number, step) {
  const { history } = run;
  const [steps, high, low] = [[], [], []];
  for (let bin = 0; bin < history.bins; bin++) {
    const place = number * history.bins + bin;
    if (history.high[place] === NOT_MEASURED && !history.bad[place]) continue;
    steps.push(history.first[bin]);
    high.push(history.bad[place] ? NaN : history.high[place]);
    low.push(history.bad[place] ? NaN : history.low[place]);
  }
  if (!steps.length) return null;
  const lines = [{ label: "highest", steps, values: high, color: "curve" }];
  if (run.history.low !== run.history.high)
    lines.push({ label: "lowest", steps, values: low, color: "curve-2", alpha: 0.7 });
  else lines[0].label = run.tensors[number].kind.startsWith("output") ? "RMS" : "norm";
  const marks = [{ step, level: "note", text: "this step" }];
  return new Plot(view, lines, { title: "Over the run", log: true, marks, height: 140 }).element;
}

/** Entries by binary exponent over the sampled steps: what underflows, overflows or drifts. */
function renderExponents(run, number) {
  const packed = run.facts.distributions;
  const without = (why) => h("p", { class: "hint" }, why);
  if (!packed)
    return without(
      "No exponents were recorded: they are taken at depth “all”, e.g. gradproof run --schedule 'all every 10th step'.",
    );
  const [steps, all, percentiles] = [packed.steps, packed.exponents, packed.percentiles].map(run.column);
  const size = steps.length * packed.bins;
  const mine = all.subarray(number * size, (number + 1) * size);
  let [lowest, highest] = [packed.bins, -1];
  for (let i = 0; i < size; i++) {
    if (!mine[i] || i % packed.bins === 0) continue; // the lowest bin holds the zeros
    lowest = Math.min(lowest, i % packed.bins);
    highest = Math.max(highest, i % packed.bins);
  }
  if (highest < 0) return without("No exponents of this tensor were recorded.");
  const rows = highest - lowest + 1;
  const image = new ImageData(steps.length, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let s = 0; s < steps.length; s++) {
    for (let bin = lowest; bin <= highest; bin++) {
      const value = mine[s * packed.bins + bin];
      if (value) pixels[(highest - bin) * steps.length + s] = pack(rampColour(value / 200));
    }
  }
  const canvas = h("canvas", {
    class: "exponents",
    role: "img",
    "aria-label": `exponents from 2 to the ${packed.low + 2 * lowest} to 2 to the ${packed.low + 2 * highest + 1}`,
  });
  canvas.width = steps.length;
  canvas.height = rows;
  canvas.style.height = `${Math.min(160, rows * 8)}px`;
  canvas.getContext("2d").putImageData(image, 0, 0);
  const power = (bin) => [h("span", {}, "2", h("sup", {}, String(packed.low + 2 * bin).replace("-", "−")))];
  const count = packed.percentages.length;
  const last = percentiles.subarray(
    (number * steps.length + steps.length - 1) * count,
    (number * steps.length + steps.length) * count,
  );
  return h(
    "div",
    { class: "distribution" },
    h("h3", {}, "Exponents of its entries"),
    h("div", { class: "exponent-box" }, h("div", { class: "powers" }, power(highest), power(lowest)), canvas),
    h(
      "p",
      { class: "hint" },
      `${plural(steps.length, "sampled step")}, ${steps[0]} to ${steps[steps.length - 1]}; brighter: more entries`,
    ),
    h(
      "p",
      { class: "hint" },
      `at the last of them ${percent((mine[size - packed.bins] / 255) ** 2)} are zero or below 2^${packed.low + 2}`.replace(
        "^-",
        "^−",
      ),
    ),
    Number.isNaN(last[0])
      ? null
      : h(
          "dl",
          { class: "percentiles" },
          packed.percentages.map((each, i) =>
            h("div", {}, h("dt", {}, `${each} %`), h("dd", {}, short(last[i]))),
          ),
        ),
  );
}

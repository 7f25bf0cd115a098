// The table of all tensors: search, sort, a small curve each; and one tensor looked at closely.

const PAGE = 60; // rows that are made at a time

const COLUMNS = [
  { id: "name", label: "tensor", text: true },
  { id: "spark", label: "over the run", unsorted: true },
  { id: "size", label: "norm or RMS", value: (run, n) => sizeOf(run, n) },
  { id: "absmax", label: "|max|", value: (run, n) => run.lastOf(n, "absmax"), wide: true },
  { id: "mean", label: "mean", value: (run, n) => run.lastOf(n, "mean"), wide: true },
  { id: "std", label: "std", value: (run, n) => run.lastOf(n, "std"), wide: true },
  { id: "zero", label: "zeros", value: (run, n) => run.lastOf(n, "zero") / run.entries(n), show: percent, wide: true },
  { id: "growth", label: "last / first", value: (run, n) => growthOf(run, n), wide: true },
  { id: "bad", label: "NaN, Inf", value: (run, n) => run.badness(n), show: (value) => badWords(value) || "none" },
];

/** What the table calls its size: an output's RMS, else the norm. */
function sizeOf(run, number) {
  if (!run.tensors[number].kind.startsWith("output")) return run.lastOf(number, "norm");
  return Math.hypot(run.lastOf(number, "mean"), run.lastOf(number, "std"));
}

function growthOf(run, number) {
  const { high, bins } = run.history;
  const known = [...high.subarray(number * bins, (number + 1) * bins)].filter((value) => value > 0);
  return known.length > 1 ? known[known.length - 1] / known[0] : NaN;
}

/** Text, or /a regular expression/; a broken one matches as text. */
function matcher(text) {
  const found = /^\/(.*)\/?$/.exec(text);
  if (found && found[1]) {
    try {
      const expression = new RegExp(found[1].replace(/\/$/, ""), "i");
      return (name) => expression.test(name);
    } catch {
      // still being typed
    }
  }
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (name) => words.every((word) => name.toLowerCase().includes(word));
}

class TensorTable {
  constructor(run, state, onPick) {
    Object.assign(this, { run, state, onPick, shown: PAGE });
    const kinds = [...new Set(run.tensors.map((tensor) => tensor.kind))];
    if (!kinds.includes(state.kind) && state.kind !== "") state.kind = kinds.includes("gradient") ? "gradient" : "";
    this.search = h("input", {
      type: "search",
      id: "search",
      placeholder: "search: text or /regex/",
      "aria-label": "search tensors by text or regular expression",
      value: state.search,
      oninput: () => this.find(this.search.value),
    });
    this.kind = h(
      "select",
      { "aria-label": "kind of tensor", onchange: () => this.choose(this.kind.value) },
      h("option", { value: "" }, "all kinds"),
      kinds.map((kind) => h("option", { value: kind }, KIND_WORDS[kind] || kind)),
    );
    this.kind.value = state.kind;
    this.count = h("span", { class: "hint", role: "status" });
    this.head = h("tr");
    this.body = h("tbody");
    this.more = h("button", { class: "more", onclick: () => this.grow() }, "show more");
    this.element = h(
      "div",
      { class: "card" },
      h("div", { class: "bar" }, this.search, this.kind, this.count),
      h("div", { class: "scroll" }, h("table", { class: "tensors" }, h("thead", {}, this.head), this.body)),
      this.more,
    );
    this.render();
  }

  find(text) {
    this.state.search = text;
    this.shown = PAGE;
    this.render();
  }

  choose(kind) {
    this.state.kind = kind;
    this.shown = PAGE;
    this.render();
  }

  grow() {
    this.shown += 4 * PAGE;
    this.render();
  }

  sortBy(id) {
    const { sort } = this.state;
    this.state.sort = { id, down: sort.id === id ? !sort.down : id !== "name" };
    this.render();
  }

  /** Numbers of the tensors that match, sorted; without an order of its own, as they are executed. */
  rows() {
    const matches = matcher(this.state.search);
    const { sort, kind } = this.state;
    const found = this.run.facts.order.filter((number) => {
      const tensor = this.run.tensors[number];
      return (!kind || tensor.kind === kind) && matches(`${tensor.name} ${tensor.kind} ${tensor.module || ""}`);
    });
    const column = COLUMNS.find((each) => each.id === sort.id);
    if (!column) return found;
    const sign = sort.down ? -1 : 1;
    const values = new Map(found.map((n) => [n, column.text ? this.run.tensors[n].name : column.value(this.run, n)]));
    const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : compareNumbers(a, b, sign));
    return found.sort((a, b) => sign * order(values.get(a), values.get(b)));
  }

  render() {
    const rows = this.rows();
    const { sort } = this.state;
    fill(
      this.head,
      COLUMNS.map((column) => {
        const label = column.unsorted
          ? column.label
          : h("button", { onclick: () => this.sortBy(column.id) }, column.label, sort.id === column.id && (sort.down ? " ↓" : " ↑"));
        const order = sort.id === column.id ? (sort.down ? "descending" : "ascending") : null;
        return h("th", { class: column.wide && "wide", scope: "col", "aria-sort": order }, label);
      }),
    );
    fill(this.count, `${rows.length.toLocaleString("en")} of ${plural(this.run.tensors.length, "tensor")}`);
    fill(this.body, rows.slice(0, this.shown).map((number) => this.row(number)));
    this.more.hidden = rows.length <= this.shown;
    fill(this.more, `show ${Math.min(4 * PAGE, rows.length - this.shown)} more of ${rows.length - this.shown}`);
    requestAnimationFrame(() => this.body.querySelectorAll("canvas").forEach((canvas) => drawSpark(this.run, canvas)));
  }

  row(number) {
    const tensor = this.run.tensors[number];
    const open = () => this.onPick(number, null);
    const cells = COLUMNS.slice(2).map((column) => {
      const value = column.value(this.run, number);
      const bad = column.id === "bad" && value > 0;
      return h("td", { class: [column.wide && "wide", bad && "bad"].filter(Boolean).join(" ") }, (column.show || short)(value));
    });
    return h(
      "tr",
      { "data-number": number, onclick: open },
      h("th", { scope: "row" }, h("button", { class: "name" }, tensor.name), !this.state.kind && h("small", {}, KIND_WORDS[tensor.kind] || tensor.kind)),
      h("td", {}, h("canvas", { class: "spark", "data-number": number, "aria-hidden": "true" })),
      cells,
    );
  }
}

/** NaN last, whichever way the table is sorted. */
function compareNumbers(a, b, sign) {
  if (Number.isNaN(a) || Number.isNaN(b)) return sign * (Number.isNaN(a) - Number.isNaN(b));
  return a - b;
}

/** A tensor's size over the run, on a logarithmic scale. */
function drawSpark(run, canvas, width = 132, height = 26) {
  const number = Number(canvas.getAttribute("data-number"));
  const context = prepare(canvas, width, height);
  const { bins, first, high, low, bad } = run.history;
  const [from, to] = run.range;
  const x = (bin) => 2 + ((first[bin] - from) / (to - from || 1)) * (width - 4);
  let [least, most] = [Infinity, -Infinity];
  for (let bin = 0; bin < bins; bin++) {
    const [bottom, top] = [low[number * bins + bin], high[number * bins + bin]];
    if (top > 0) most = Math.max(most, top);
    if (bottom > 0) least = Math.min(least, bottom);
  }
  const span = Math.log(most / least) || 1;
  const y = (value) => height - 4 - (Math.log(Math.max(value, least) / least) / span) * (height - 8);
  context.strokeStyle = color("curve");
  context.lineWidth = 1.3;
  context.beginPath();
  let open = false;
  for (let bin = 0; bin < bins; bin++) {
    const [bottom, top] = [low[number * bins + bin], high[number * bins + bin]];
    if (top < 0) continue;
    if (open) context.lineTo(x(bin), y(top));
    else context.moveTo(x(bin), y(top));
    if (bottom >= 0 && bottom < top) context.lineTo(x(bin), y(bottom));
    open = true;
  }
  context.stroke();
  context.fillStyle = color("bad");
  for (let bin = 0; bin < bins; bin++) if (bad[number * bins + bin]) context.fillRect(x(bin) - 1, 0, 2, height);
}

// one tensor ---------------------------------------------------------------------------------------------------

/** The panel about one tensor at one step (the last measured one if none is given). */
function renderTensor(run, view, number, step, onPick, onClose) {
  const tensor = run.tensors[number];
  const at = step ?? run.last.steps[number];
  return h(
    "aside",
    { class: "panel", "aria-label": "one tensor", tabindex: "-1" },
    h("button", { class: "quiet close", title: "close (Esc)", onclick: onClose }, "✕"),
    h("h2", {}, tensor.name),
    h("p", { class: "facts" }, [KIND_WORDS[tensor.kind] || tensor.kind, tensor.module, shapeOf(run, tensor), tensor.dtype].filter(Boolean).join(" · ")),
    h("p", { class: "kinds" }, siblingsOf(run, number).map(([other, label]) =>
      h("button", { class: other === number ? "chip on" : "chip", onclick: () => onPick(other, at) }, label))),
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
    rows.push([size, high === NOT_MEASURED ? "not measured here" : low < high ? `${short(low)} to ${short(high)}` : short(high)]);
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
    h("dl", {}, rows.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
    !exact && rows.length ? h("p", { class: "hint" }, "of histories the page keeps 8 bits a number; the last measured step is exact") : null,
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
  if (run.history.low !== run.history.high) lines.push({ label: "lowest", steps, values: low, color: "curve-2", alpha: 0.7 });
  else lines[0].label = run.tensors[number].kind.startsWith("output") ? "RMS" : "norm";
  const marks = [{ step, level: "note", text: "this step" }];
  return new Plot(view, lines, { title: "Over the run", log: true, marks, height: 140 }).element;
}

/** Entries by binary exponent over the sampled steps: what underflows, overflows or drifts. */
function renderExponents(run, number) {
  const packed = run.facts.distributions;
  const missing = (why) => h("p", { class: "hint" }, why);
  if (!packed) return missing("No exponents were recorded: they are taken at depth “all”, e.g. gradproof run --schedule 'all every 10th step'.");
  const [steps, all, percentiles] = [packed.steps, packed.exponents, packed.percentiles].map(run.column);
  const size = steps.length * packed.bins;
  const mine = all.subarray(number * size, (number + 1) * size);
  let [lowest, highest] = [packed.bins, -1];
  for (let i = 0; i < size; i++) {
    if (!mine[i] || i % packed.bins === 0) continue; // the lowest bin holds the zeros
    lowest = Math.min(lowest, i % packed.bins);
    highest = Math.max(highest, i % packed.bins);
  }
  if (highest < 0) return missing("No exponents of this tensor were recorded.");
  const rows = highest - lowest + 1;
  const image = new ImageData(steps.length, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let s = 0; s < steps.length; s++) {
    for (let bin = lowest; bin <= highest; bin++) {
      const value = mine[s * packed.bins + bin];
      if (value) pixels[(highest - bin) * steps.length + s] = pack(rampColour(value / 200));
    }
  }
  const canvas = h("canvas", { class: "exponents", role: "img", "aria-label": `exponents from 2 to the ${packed.low + 2 * lowest} to 2 to the ${packed.low + 2 * highest + 1}` });
  canvas.width = steps.length;
  canvas.height = rows;
  canvas.style.height = `${Math.min(160, rows * 8)}px`;
  canvas.getContext("2d").putImageData(image, 0, 0);
  const power = (bin) => [h("span", {}, "2", h("sup", {}, String(packed.low + 2 * bin).replace("-", "−")))];
  const count = packed.percentages.length;
  const last = percentiles.subarray((number * steps.length + steps.length - 1) * count, (number * steps.length + steps.length) * count);
  return h(
    "div",
    { class: "distribution" },
    h("h3", {}, "Exponents of its entries"),
    h("div", { class: "exponent-box" }, h("div", { class: "powers" }, power(highest), power(lowest)), canvas),
    h("p", { class: "hint" }, `${plural(steps.length, "sampled step")}, ${steps[0]} to ${steps[steps.length - 1]}; brighter: more entries`),
    h("p", { class: "hint" }, `at the last of them ${percent((mine[size - packed.bins] / 255) ** 2)} are zero or below 2^${packed.low + 2}`.replace("^-", "^−")),
    Number.isNaN(last[0]) ? null : h("dl", { class: "percentiles" }, packed.percentages.map((each, i) => h("div", {}, h("dt", {}, `${each} %`), h("dd", {}, short(last[i]))))),
  );
}

// Step × layer as one picture, in the order of execution: an explosion is seen travelling.
// A column holds from one measured step to the next; what is not finite is red.

// dark to bright, without red, which is kept for what is not finite
const RAMP = [
  [26, 28, 70],
  [38, 66, 130],
  [42, 112, 152],
  [58, 154, 148],
  [120, 190, 130],
  [196, 216, 128],
  [250, 236, 170],
];
const RED = [229, 57, 70];

/** What the heat map can show: which tensors, and one number of each in each stretch. */
const QUANTITIES = [
  { id: "gradient", label: "gradient norm", kind: "gradient" },
  { id: "ratio", label: "update / weight", kind: "update", per: "weight" },
  { id: "output", label: "activation RMS", kind: "output" },
  { id: "output_gradient", label: "RMS of the gradient that comes back", kind: "output_gradient" },
  { id: "weight", label: "weight norm", kind: "weight" },
  { id: "adam_m", label: "Adam's m, norm", kind: "adam_m" },
  { id: "adam_v", label: "Adam's v, norm", kind: "adam_v" },
  { id: "dead", label: "share of dead units", kind: "output", detail: "extra" },
  { id: "eps", label: "share where ε outweighs √v", kind: "adam_v", detail: "extra" },
  { id: "cosine", label: "cosine of successive gradients", kind: "gradient", detail: "extra" },
];

function quantitiesOf(run) {
  return QUANTITIES.filter(({ kind, per, detail }) => {
    const rows = run.ofKind(kind);
    if (detail) return rows.some((number) => run.hasDetail(detail, number));
    return rows.length && (!per || run.ofKind(per).length);
  });
}

/** Rows, stretches and values of a quantity; NaN: not measured. */
function layOut(run, quantity, matricesOnly = false) {
  const rows = run.ofKind(quantity.kind).filter((number) => !matricesOnly || isMatrix(run, number));
  const { bins, first, last, high, bad } = quantity.detail ? { ...run.details, bad: null } : run.history;
  const values = new Float32Array(rows.length * bins);
  const broken = new Uint8Array(rows.length * bins);
  rows.forEach((number, row) => {
    const base = quantity.per ? run.number(quantity.per, run.tensors[number].name) : null;
    for (let bin = 0; bin < bins; bin++) {
      const place = row * bins + bin;
      if (quantity.detail) {
        values[place] = run.detail(quantity.detail, number, bin);
        continue;
      }
      let value = high[number * bins + bin];
      if (quantity.per) value = base === undefined ? NOT_MEASURED : ratio(value, high[base * bins + bin]);
      values[place] = value === NOT_MEASURED ? NaN : value;
      broken[place] = bad[number * bins + bin];
    }
  });
  return { rows, bins, first, last, values, broken, log: !quantity.detail };
}

function isMatrix(run, number) {
  return (run.parameter(run.tensors[number].name)?.shape || []).length > 1;
}

const ratio = (value, base) => (value === NOT_MEASURED || !(base > 0) ? NOT_MEASURED : value / base);

/** The ends of the colour scale: nearly all values, so that one outlier does not grey the rest. */
function colourRange(layout) {
  const known = [];
  const every = Math.max(1, Math.floor(layout.values.length / 50000));
  for (let i = 0; i < layout.values.length; i += every) {
    const value = layout.values[i];
    if (Number.isFinite(value) && (!layout.log || value > 0)) known.push(value);
  }
  if (!known.length) return [0.1, 1];
  known.sort((a, b) => a - b);
  const [low, high] = [known[Math.floor(0.01 * known.length)], known[Math.floor(0.995 * (known.length - 1))]];
  return low < high ? [low, high] : layout.log ? [low / 10, high * 10] : [low - 0.5, high + 0.5];
}

function rampColour(share) {
  const place = Math.max(0, Math.min(1, share)) * (RAMP.length - 1);
  const from = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[from].map((value, i) => Math.round(value + (place - from) * (RAMP[from + 1][i] - value)));
}

class Heatmap {
  /** onPick(number, step) hears of a click. */
  constructor(run, view, state, onPick) {
    Object.assign(this, { run, view, state, onPick });
    this.canvas = h("canvas", { role: "img" });
    this.overlay = h("canvas", { class: "overlay", "aria-hidden": "true" });
    this.names = h("div", { class: "row-names", "aria-hidden": "true" });
    this.axis = h("div", { class: "ticks", "aria-hidden": "true" });
    this.scale = h("div", { class: "scale" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.box = h(
      "div",
      { class: "drawing heat" },
      this.canvas,
      this.overlay,
      this.names,
      this.axis,
      this.tip,
    );
    const quantities = quantitiesOf(run);
    this.select = h(
      "select",
      { "aria-label": "what the heat map shows", onchange: (event) => this.choose(event.target.value) },
      quantities.map(({ id, label }) => h("option", { value: id }, label)),
    );
    this.only = h("input", {
      type: "checkbox",
      id: "matrices",
      onchange: (event) => this.filter(event.target.checked),
    });
    this.only.checked = state.matricesOnly;
    this.onlyLabel = h("label", { for: "matrices" }, this.only, "matrices only");
    this.rug = h("p", { class: "hint" });
    this.element = h(
      "div",
      { class: "card" },
      h("div", { class: "bar" }, this.select, this.scale, this.onlyLabel),
      this.box,
      this.rug,
    );
    handlePointer(
      this.overlay,
      view,
      () => this.plane(),
      (step, y) => this.pick(step, y),
      (event) => this.point(event),
    );
    const listener = (onlyCursor) => {
      if (!this.element.isConnected) view.listeners.delete(listener);
      else if (onlyCursor) this.drawCursor();
      else this.draw();
    };
    view.listeners.add(listener);
    new ResizeObserver(() => this.draw()).observe(this.box);
    const wanted = quantities.some(({ id }) => id === state.quantity) ? state.quantity : quantities[0]?.id;
    if (wanted) this.choose(wanted);
  }

  filter(matricesOnly) {
    this.state.matricesOnly = matricesOnly;
    this.choose(this.quantity.id);
  }

  choose(id) {
    this.state.quantity = id;
    this.select.value = id;
    this.quantity = QUANTITIES.find((each) => each.id === id);
    const all = this.run.ofKind(this.quantity.kind);
    const matrices = all.filter((number) => isMatrix(this.run, number)).length;
    this.onlyLabel.hidden = !matrices || matrices === all.length; // nothing to choose from
    this.layout = layOut(this.run, this.quantity, this.state.matricesOnly && !this.onlyLabel.hidden);
    this.limits = colourRange(this.layout);
    const count = this.layout.rows.length;
    this.rowHeight = Math.max(2, Math.min(18, Math.floor(620 / Math.max(1, count))));
    this.height = Math.max(40, this.rowHeight * count);
    this.box.style.height = `${this.height + 30}px`;
    this.canvas.setAttribute(
      "aria-label",
      `Heat map of ${this.quantity.label}: ${count} layers in execution order`,
    );
    const measured = this.quantity.detail ? this.run.details.bins : this.run.history.bins;
    const thinned = measured < this.run.history.frames;
    fill(
      this.rug,
      `${plural(this.run.history.frames, "measured step")}` +
        (thinned ? `, drawn as ${measured} stretches` : "") +
        (thinned && !this.quantity.detail ? " with their highest values" : "") +
        "; a column holds until the next measured step (ticks below the map). Red: NaN or Inf. Click a cell.",
    );
    this.drawScale();
    this.draw();
  }

  plane() {
    const width = this.box.clientWidth;
    const left = width < 560 ? 92 : 190;
    return { left, width: Math.max(10, width - left - 12) };
  }

  share(value) {
    const [low, high] = this.limits;
    if (!this.layout.log) return (value - low) / (high - low);
    return (Math.log(Math.max(value, 1e-45)) - Math.log(low)) / (Math.log(high) - Math.log(low));
  }

  /** One ImageData, one putImageData, then stretched to the height of the rows. */
  draw() {
    const boxWidth = this.box.clientWidth;
    if (!boxWidth || !this.layout) return;
    const { rows, bins, first, values, broken } = this.layout;
    const { left, width } = this.plane();
    const context = prepare(this.canvas, boxWidth, this.height + 30);
    const columns = Math.round(width);
    if (!rows.length || !bins) return;
    const binAt = new Int32Array(columns);
    const [from, to] = this.view.range;
    for (let x = 0; x < columns; x++) {
      const step = from + ((x + 0.5) / columns) * (to - from);
      binAt[x] = step + 1e-9 < first[0] - (to - from) / columns ? -1 : placeOf(first, step);
    }
    const image = new ImageData(columns, rows.length);
    const pixels = new Uint32Array(image.data.buffer);
    const colours = new Uint32Array(bins);
    for (let row = 0; row < rows.length; row++) {
      for (let bin = 0; bin < bins; bin++) colours[bin] = this.colourAt(row * bins + bin, values, broken);
      for (let x = 0, base = row * columns; x < columns; x++)
        pixels[base + x] = binAt[x] < 0 ? 0 : colours[binAt[x]];
    }
    this.scratch ??= document.createElement("canvas");
    this.scratch.width = columns;
    this.scratch.height = rows.length;
    this.scratch.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.scratch, left, 0, width, rows.length * this.rowHeight);
    this.drawRug(context, left, width);
    this.drawNames(left);
    this.drawCursor();
  }

  colourAt(place, values, broken) {
    if (broken[place]) return pack(RED);
    const value = values[place];
    if (Number.isNaN(value)) return 0;
    return Number.isFinite(value) ? pack(rampColour(this.share(value))) : pack(RED);
  }

  drawRug(context, left, width) {
    const [from, to] = this.view.range;
    context.fillStyle = color("faint");
    for (const step of this.layout.first) {
      if (step < from || step > to) continue;
      context.fillRect(left + ((step - from) / (to - from || 1)) * width, this.height + 2, 1, 4);
    }
    const labels = ticks(from, to, width / 90).filter(Number.isInteger);
    fill(
      this.axis,
      labels.map((step) =>
        place(
          h("span", { class: "x" }, step.toLocaleString("en")),
          left + ((step - from) / (to - from || 1)) * width,
          this.height + 8,
        ),
      ),
    );
  }

  drawNames(left) {
    const every = Math.ceil(11 / this.rowHeight);
    const letters = Math.floor((left - 14) / 6.4);
    const texts = [];
    this.layout.rows.forEach((number, row) => {
      if (row % every) return;
      const name = visible(this.run.tensors[number].name);
      const text = name.length > letters ? `…${name.slice(1 - letters)}` : name;
      const label = h("span", { title: name }, text);
      label.style.top = `${row * this.rowHeight + this.rowHeight / 2 - 7}px`;
      label.style.width = `${left - 8}px`;
      texts.push(label);
    });
    fill(this.names, texts);
  }

  drawScale() {
    const stops = RAMP.map((each) => `rgb(${each.join(" ")})`).join(", ");
    const gradient = h("i", { class: "gradient" });
    gradient.style.background = `linear-gradient(90deg, ${stops})`;
    const red = h("i", { class: "red" });
    fill(this.scale, short(this.limits[0]), gradient, short(this.limits[1]), red, "not finite");
  }

  drawCursor() {
    if (!this.layout) return;
    const context = prepare(this.overlay, this.box.clientWidth, this.height + 30);
    const { left, width } = this.plane();
    const [from, to] = this.view.range;
    const x = (step) => left + ((step - from) / (to - from || 1)) * width;
    if (this.view.cursor !== null) {
      context.fillStyle = "rgba(255,255,255,.75)";
      context.fillRect(Math.round(x(this.view.cursor)), 0, 1, this.height);
    }
    const picked = this.state.picked;
    const row = picked ? this.layout.rows.indexOf(picked.number) : -1;
    if (row >= 0) {
      context.strokeStyle = "#fff";
      context.lineWidth = 1.5;
      context.strokeRect(left, row * this.rowHeight - 0.5, width, this.rowHeight + 1);
      context.fillStyle = "#fff";
      context.fillRect(Math.round(x(picked.step)) - 1, row * this.rowHeight - 3, 3, this.rowHeight + 6);
    }
  }

  cellAt(step, y) {
    const row = Math.floor(y / this.rowHeight);
    if (row < 0 || row >= this.layout.rows.length || !this.layout.bins) return null;
    const bin = placeOf(this.layout.first, step);
    return { row, bin, number: this.layout.rows[row] };
  }

  pick(step, y) {
    const cell = this.cellAt(step, y);
    if (cell) this.onPick(cell.number, this.layout.first[cell.bin]);
  }

  point(event) {
    const cell = event && this.view.cursor !== null && this.cellAt(this.view.cursor, event.offsetY);
    this.tip.hidden = !cell || event.offsetX < this.plane().left;
    if (this.tip.hidden) return;
    const { bins, first, last, values, broken } = this.layout;
    const at = cell.row * bins + cell.bin;
    const steps =
      first[cell.bin] === last[cell.bin]
        ? `step ${first[cell.bin]}`
        : `steps ${first[cell.bin]} to ${last[cell.bin]}`;
    const value = Number.isNaN(values[at]) ? "not measured" : short(values[at]);
    fill(
      this.tip,
      h("b", {}, this.run.tensors[cell.number].name),
      h("br"),
      `${this.quantity.label} ${value}, ${steps}`,
      broken[at] ? h("em", {}, ` ${badWords(broken[at])}`) : null,
    );
    const right = event.offsetX > this.box.clientWidth / 2;
    this.tip.style.left = right ? "auto" : `${event.offsetX + 14}px`;
    this.tip.style.right = right ? `${this.box.clientWidth - event.offsetX + 14}px` : "auto";
    this.tip.style.top = `${Math.max(0, event.offsetY - 10)}px`;
  }
}

const pack = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

function badWords(flags) {
  return [flags & BAD_NAN && "NaN", flags & BAD_INF && "Inf"].filter(Boolean).join(" and ");
}

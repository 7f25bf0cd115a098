// Curves over steps. Lines are drawn on a canvas; every word and number is text.

/** Round numbers for an axis. */
function ticks(from, to, most) {
  const raw = (to - from) / Math.max(1, most);
  if (!(raw > 0) || !Number.isFinite(raw)) return [from];
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let place = Math.ceil(from / size - 1e-9); place * size <= to + size * 1e-9; place++)
    found.push(place * size + 0); // not −0
  return found;
}

function logTicks(from, to, most) {
  const [low, high] = [Math.log10(from), Math.log10(to)];
  const every = high - low > 2.2 ? Math.ceil((high - low) / most) : 0;
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    if (every && power % every) continue;
    for (const digit of every ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
  }
  const inside = found.filter((each) => each >= from && each <= to);
  return inside.length > 1 ? inside : ticks(from, to, most).filter((each) => each > 0);
}

const MARGIN = { left: 58, right: 12, top: 10, bottom: 22 };

class Plot {
  /** lines: [{label, steps, values, color, width, alpha, dash, points, pointsOnly}]; options: {title, log, zeroToOne, marks, hint, height}. */
  constructor(view, lines, options) {
    this.view = view;
    this.lines = lines;
    this.options = { height: 170, marks: [], ...options };
    this.log = this.options.log === "auto" ? spansDecades(lines) : Boolean(this.options.log);
    this.canvas = h("canvas", { role: "img", "aria-label": this.summary() });
    this.overlay = h("canvas", { class: "overlay", "aria-hidden": "true" });
    this.labels = h("div", { class: "ticks", "aria-hidden": "true" });
    this.legend = h("div", { class: "legend" });
    this.logButton = h(
      "button",
      {
        class: "chip",
        title: "logarithmic scale",
        "aria-pressed": String(this.log),
        onclick: () => this.toggleLog(),
      },
      "log",
    );
    this.box = h("div", { class: "drawing" }, this.canvas, this.overlay, this.labels);
    this.box.style.height = `${this.options.height}px`; // before it is drawn: what stands below must not jump
    this.element = h(
      "figure",
      { class: "plot card", "data-plot": this.options.title },
      h(
        "figcaption",
        {},
        h("h3", {}, this.options.title),
        this.options.log !== undefined && this.logButton,
        this.legend,
      ),
      this.box,
      this.options.hint && h("p", { class: "hint" }, this.options.hint),
    );
    this.follow();
    handlePointer(this.overlay, view, () => this.plane());
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  follow() {
    const listener = (onlyCursor) => {
      if (!this.element.isConnected) this.view.listeners.delete(listener);
      else if (onlyCursor) this.drawCursor();
      else this.draw();
    };
    this.view.listeners.add(listener);
  }

  summary() {
    const parts = this.lines.map((line) => {
      const last = line.values[line.values.length - 1];
      return `${line.label}: ${plural(line.values.length, "point")}, last ${short(last)}`;
    });
    return `${this.options.title}. ${parts.join("; ")}`;
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.draw();
  }

  plane() {
    const width = this.box.clientWidth;
    return { left: MARGIN.left, width: Math.max(10, width - MARGIN.left - MARGIN.right) };
  }

  /** Lowest and highest value in view; a tenth of room around them. */
  limits() {
    if (this.options.zeroToOne) return [0, 1.02];
    const [from, to] = this.view.range;
    let [low, high] = [Infinity, -Infinity];
    for (const { steps, values } of this.lines) {
      const start = Math.max(0, placeOf(steps, from));
      for (let i = start; i < steps.length && (steps[i] <= to || i === start); i++) {
        const value = values[i];
        if (!Number.isFinite(value) || (this.log && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (low > high) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.2, high * 1.2];
    const room = 0.08 * (high - low) || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    const height = this.options.height;
    const context = prepare(this.canvas, width, height);
    const { left, width: inner } = this.plane();
    const [top, bottom] = [MARGIN.top, height - MARGIN.bottom];
    const [from, to] = this.view.range;
    const [low, high] = this.limits();
    const scale = this.log ? Math.log : (value) => value;
    const [zero, unit] = [scale(low), (bottom - top) / (scale(high) - scale(low))];
    this.x = (step) => left + ((step - from) / (to - from || 1)) * inner;
    this.y = (value) => bottom - (scale(value) - zero) * unit;
    const across = this.log ? logTicks(low, high, 4) : ticks(low, high, 4);
    this.drawGrid(context, across, left, inner, bottom);
    context.save();
    context.beginPath();
    context.rect(left, 0, inner, bottom + 1);
    context.clip();
    for (const mark of this.options.marks) this.drawMark(context, mark, top, bottom);
    for (const line of this.lines) this.drawLine(context, line, from, to, top);
    context.restore();
    this.drawCursor();
  }

  drawGrid(context, across, left, inner, bottom) {
    context.strokeStyle = color("line");
    context.lineWidth = 1;
    const texts = [];
    for (const value of across) {
      const y = Math.round(this.y(value)) + 0.5;
      if (y < 4 || y > bottom + 1) continue;
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + inner, y);
      context.stroke();
      texts.push(place(h("span", { class: "y" }, tickText(value, this.options.zeroToOne)), null, y - 8));
    }
    for (const step of ticks(...this.view.range, inner / 90)) {
      if (!Number.isInteger(step)) continue;
      texts.push(place(h("span", { class: "x" }, step.toLocaleString("en")), this.x(step), bottom + 5));
    }
    fill(this.labels, texts);
  }

  drawLine(context, line, from, to, top) {
    const { steps, values } = line;
    context.strokeStyle = color(line.color);
    context.globalAlpha = line.alpha ?? 1;
    context.lineWidth = line.width ?? 1.6;
    context.setLineDash(line.dash ?? []);
    context.lineJoin = "round";
    context.beginPath();
    const start = Math.max(0, placeOf(steps, from));
    const long = longGap(steps);
    const gaps = new Path2D();
    let [open, drawn] = [false, 0];
    const [bad, lonely] = [[], []];
    for (let i = start; i < steps.length; i++) {
      const value = values[i];
      if (!Number.isFinite(value) || (this.log && value <= 0)) {
        if (!Number.isFinite(value)) bad.push(i);
        open = false;
      } else {
        const [x, y] = [this.x(steps[i]), this.y(value)];
        const far = open && steps[i] - steps[i - 1] > long;
        if (far) {
          lonely.push([x, y], [this.x(steps[i - 1]), this.y(values[i - 1])]);
          gaps.moveTo(this.x(steps[i - 1]), this.y(values[i - 1]));
          gaps.lineTo(x, y);
        }
        if (open && !far) context.lineTo(x, y);
        else context.moveTo(x, y);
        if (!open && (i + 1 === steps.length || !Number.isFinite(values[i + 1]))) context.lineTo(x + 0.1, y);
        open = true;
        drawn++;
      }
      if (steps[i] > to) break;
    }
    if (!line.pointsOnly) {
      context.stroke();
      context.setLineDash([2, 4]); // nothing was measured there
      context.globalAlpha = 0.5 * (line.alpha ?? 1);
      context.stroke(gaps);
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
    if (drawn === 1 || line.points || line.pointsOnly) this.drawPoints(context, line, start, to);
    context.fillStyle = color(line.color);
    for (const [x, y] of lonely) context.fillRect(x - 1.5, y - 1.5, 3, 3);
    context.fillStyle = color("bad");
    for (const i of bad) context.fillRect(this.x(steps[i]) - 1, top, 2, 7); // NaN and Inf: a red tick at the top
  }

  drawPoints(context, { steps, values, color: name }, start, to) {
    context.fillStyle = color(name);
    for (let i = start; i < steps.length && steps[i] <= to; i++) {
      if (!Number.isFinite(values[i])) continue;
      context.beginPath();
      context.arc(this.x(steps[i]), this.y(values[i]), 2.5, 0, 7);
      context.fill();
    }
  }

  drawMark(context, mark, top, bottom) {
    const x = Math.round(this.x(mark.step)) + 0.5;
    context.strokeStyle = color(mark.level);
    context.globalAlpha = mark.level === "note" ? 0.35 : 0.8;
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, bottom);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  /** The cursor, and in the legend the values there (or the last ones). */
  drawCursor() {
    if (!this.x) return;
    const width = this.box.clientWidth;
    const context = prepare(this.overlay, width, this.options.height);
    const step = this.view.cursor;
    const bottom = this.options.height - MARGIN.bottom;
    const here = step !== null && step >= this.view.range[0] && step <= this.view.range[1];
    if (here) {
      context.fillStyle = color("faint");
      context.fillRect(Math.round(this.x(step)), MARGIN.top, 1, bottom - MARGIN.top);
    }
    const entries = this.lines.map((line) => {
      const i = here ? placeOf(line.steps, step) : line.values.length - 1;
      const value = line.values[i];
      if (here && Number.isFinite(value) && this.x(line.steps[i]) >= MARGIN.left) {
        context.fillStyle = color(line.color);
        context.beginPath();
        context.arc(this.x(line.steps[i]), this.y(value), 3, 0, 7);
        context.fill();
      }
      const swatch = h("i", { class: line.dash ? "swatch dashed" : "swatch" });
      swatch.style.setProperty("--c", color(line.color));
      return h("span", { class: "entry" }, swatch, line.label, " ", h("b", {}, short(value)));
    });
    const mark = here && this.options.marks.find((each) => Math.abs(this.x(each.step) - this.x(step)) < 6);
    fill(
      this.legend,
      here && h("span", { class: "entry at" }, "step ", h("b", {}, Math.round(step).toLocaleString("en"))),
      entries,
      mark && h("span", { class: `entry ${mark.level}` }, mark.text),
    );
  }
}

/** Whether values are all above zero and so far apart that a linear scale would show only the largest. */
function spansDecades(lines) {
  let [low, high] = [Infinity, 0];
  for (const { values } of lines) {
    for (const value of values) {
      if (value <= 0) return false;
      if (value < low) low = value;
      if (value > high && Number.isFinite(value)) high = value;
    }
  }
  return high > 20 * low;
}

/** Steps between two points that are too many for a line to be drawn through: ten times the usual. */
function longGap(steps) {
  if (steps.length < 3) return Infinity;
  const gaps = Array.from(steps.slice(1), (step, i) => step - steps[i]).sort((a, b) => a - b);
  return 10 * Math.max(1, gaps[gaps.length >> 1]);
}

function tickText(value, asPercent) {
  return asPercent
    ? `${Math.round(100 * value)} %`
    : short(Number(value.toPrecision(6))).replace(/\.?0+e/, "e");
}

/** Put a label at a place of its plot. */
function place(element, x, y) {
  if (x !== null) element.style.left = `${x}px`;
  element.style.top = `${y}px`;
  return element;
}

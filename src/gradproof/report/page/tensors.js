// The table of all tensors: search, sort, a small curve each.

const PAGE = 60; // rows that are made at a time

const COLUMNS = [
  { id: "name", label: "tensor", text: true },
  { id: "spark", label: "over the run", unsorted: true },
  { id: "size", label: "norm or RMS", value: (run, n) => sizeOf(run, n) },
  { id: "absmax", label: "|max|", value: (run, n) => run.lastOf(n, "absmax"), wide: true },
  { id: "mean", label: "mean", value: (run, n) => run.lastOf(n, "mean"), wide: true },
  { id: "std", label: "std", value: (run, n) => run.lastOf(n, "std"), wide: true },
  {
    id: "zero",
    label: "zeros",
    value: (run, n) => run.lastOf(n, "zero") / run.entries(n),
    show: percent,
    wide: true,
  },
  { id: "growth", label: "last / first", value: (run, n) => growthOf(run, n), wide: true },
  {
    id: "bad",
    label: "NaN, Inf",
    value: (run, n) => run.badness(n),
    show: (value) => badWords(value) || "none",
  },
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
    if (!kinds.includes(state.kind) && state.kind !== "")
      state.kind = kinds.includes("gradient") ? "gradient" : "";
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
      return (
        (!kind || tensor.kind === kind) && matches(`${tensor.name} ${tensor.kind} ${tensor.module || ""}`)
      );
    });
    const column = COLUMNS.find((each) => each.id === sort.id);
    if (!column) return found;
    const sign = sort.down ? -1 : 1;
    const values = new Map(
      found.map((n) => [n, column.text ? this.run.tensors[n].name : column.value(this.run, n)]),
    );
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
          : h(
              "button",
              { onclick: () => this.sortBy(column.id) },
              column.label,
              sort.id === column.id && (sort.down ? " ↓" : " ↑"),
            );
        const order = sort.id === column.id ? (sort.down ? "descending" : "ascending") : null;
        return h("th", { class: column.wide && "wide", scope: "col", "aria-sort": order }, label);
      }),
    );
    fill(this.count, `${rows.length.toLocaleString("en")} of ${plural(this.run.tensors.length, "tensor")}`);
    fill(
      this.body,
      rows.slice(0, this.shown).map((number) => this.row(number)),
    );
    this.more.hidden = rows.length <= this.shown;
    fill(
      this.more,
      `show ${Math.min(4 * PAGE, rows.length - this.shown)} more of ${rows.length - this.shown}`,
    );
    requestAnimationFrame(() =>
      this.body.querySelectorAll("canvas").forEach((canvas) => drawSpark(this.run, canvas)),
    );
  }

  row(number) {
    const tensor = this.run.tensors[number];
    const open = () => this.onPick(number, null);
    const cells = COLUMNS.slice(2).map((column) => {
      const value = column.value(this.run, number);
      const bad = column.id === "bad" && value > 0;
      return h(
        "td",
        { class: [column.wide && "wide", bad && "bad"].filter(Boolean).join(" ") },
        (column.show || short)(value),
      );
    });
    return h(
      "tr",
      { "data-number": number, onclick: open },
      h(
        "th",
        { scope: "row" },
        h("button", { class: "name" }, tensor.name),
        !this.state.kind && h("small", {}, KIND_WORDS[tensor.kind] || tensor.kind),
      ),
      h(
        "td",
        {},
        h("canvas", { class: "spark", width: 132, height: 26, "data-number": number, "aria-hidden": "true" }),
      ),
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
  for (let bin = 0; bin < bins; bin++)
    if (bad[number * bins + bin]) context.fillRect(x(bin) - 1, 0, 2, height);
}

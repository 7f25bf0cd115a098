// Reads what report/columns.py and payload.py packed: facts as JSON, numbers as typed arrays.

const NOT_MEASURED = -1;
const BAD_NAN = 1,
  BAD_INF = 2;

async function inflate(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** One array out of the block: see columns.py for the types. */
function decode(block, [offset, length, type]) {
  if (type === "u1") return block.subarray(offset, offset + length);
  const size = Number(type[1]);
  const words = new Uint32Array(length);
  for (let place = 0; place < size; place++) {
    const shift = 8 * place + (type === "h2" ? 16 : 0);
    for (let i = 0, from = offset + place * length; i < length; i++) words[i] |= block[from + i] << shift;
  }
  if (type !== "d4") return new Float32Array(words.buffer);
  const values = new Int32Array(words.buffer);
  for (let i = 1; i < length; i++) values[i] += values[i - 1];
  return values;
}

/** A run as the page sees it. */
class RunData {
  constructor(facts, block) {
    const directory = facts.info.directory;
    if (directory && directory.length > 1) {
      for (const part of ["diagnosis", "verdicts"]) facts[part] = shorten(facts[part], `${directory}/`);
    }
    this.facts = facts;
    this.name = facts.name;
    this.tensors = facts.tensors;
    this.column = (reference) => decode(block, reference);
    this.curves = facts.curves.map((curve) => ({
      ...curve,
      steps: this.column(curve.steps),
      values: this.column(curve.values),
    }));
    this.numbers = new Map(this.tensors.map((tensor, number) => [key(tensor.kind, tensor.name), number]));
    this.rank = new Array(this.tensors.length).fill(0);
    facts.order.forEach((number, place) => (this.rank[number] = place));
    this.history = this.readHistory(facts.history);
    this.details = this.readDetails(facts.details);
    this.last = {
      names: facts.last.names,
      steps: this.column(facts.last.step),
      values: this.column(facts.last.values),
    };
    this.range = this.findRange();
  }

  readHistory(packed) {
    const [first, last, high, bad] = ["first", "last", "high", "bad"].map((name) =>
      this.column(packed[name]),
    );
    const low = packed.low ? this.column(packed.low) : high;
    return { frames: packed.frames, first, last, high, low, bad, bins: first.length };
  }

  readDetails(packed) {
    const first = this.column(packed.first);
    return {
      ...packed,
      first,
      last: this.column(packed.last),
      values: this.column(packed.values),
      bins: first.length,
    };
  }

  /** Steps from the first to the last that anything was recorded at. */
  findRange() {
    let [from, to] = [Infinity, -Infinity];
    for (const steps of [...this.curves.map((curve) => curve.steps), this.history.first, this.history.last]) {
      if (!steps.length) continue;
      from = Math.min(from, steps[0]);
      to = Math.max(to, steps[steps.length - 1]);
    }
    return from <= to ? [from, to] : [0, 1];
  }

  curvesOf(id) {
    return this.curves.filter((curve) => curve.id === id);
  }

  number(kind, name) {
    return this.numbers.get(key(kind, name));
  }

  /** Numbers of the tensors of a kind, in the order of execution. */
  ofKind(kind) {
    return this.facts.order.filter((number) => this.tensors[number].kind === kind);
  }

  lastOf(number, statistic) {
    return this.last.values[number * this.last.names.length + this.last.names.indexOf(statistic)];
  }

  /** A detail (min, max, mean, std, zero, extra) of a tensor in a stretch. */
  detail(name, number, bin) {
    const { names, bins, values } = this.details;
    return values[(names.indexOf(name) * this.tensors.length + number) * bins + bin];
  }

  hasDetail(name, number) {
    for (let bin = 0; bin < this.details.bins; bin++) {
      if (!Number.isNaN(this.detail(name, number, bin))) return true;
    }
    return false;
  }

  /** Whether a tensor ever held something that is not finite: BAD_NAN, BAD_INF or both. */
  badness(number) {
    let found = 0;
    const { bad, bins } = this.history;
    for (let bin = 0; bin < bins; bin++) found |= bad[number * bins + bin];
    return found;
  }

  /** Entries of a tensor, where its shape is known. */
  entries(number) {
    const shape = this.tensors[number].shape || this.parameter(this.tensors[number].name)?.shape;
    return shape ? shape.reduce((product, size) => product * size, 1) : NaN;
  }

  parameter(name) {
    this.parameters ??= new Map((this.facts.info.parameters || []).map((each) => [each.name, each]));
    return this.parameters.get(name);
  }
}

/** Paths below the directory that the script ran in, without it. */
function shorten(data, directory) {
  if (typeof data === "string") return data.replaceAll(directory, "");
  if (Array.isArray(data)) return data.map((each) => shorten(each, directory));
  if (data === null || typeof data !== "object") return data;
  return Object.fromEntries(Object.entries(data).map(([name, value]) => [name, shorten(value, directory)]));
}

const key = (kind, name) => `${kind}\u0000${name}`;

/** The last place whose step is not after `step`; 0 if all are. */
function placeOf(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

async function unpackRun(packed) {
  const [facts, block] = await Promise.all([inflate(packed.facts), inflate(packed.columns)]);
  return new RunData(JSON.parse(new TextDecoder().decode(facts)), block);
}

const KIND_WORDS = {
  output: "output",
  output_gradient: "gradient of output",
  gradient: "gradient",
  weight: "weight",
  update: "update",
  adam_m: "Adam m",
  adam_v: "Adam v",
};

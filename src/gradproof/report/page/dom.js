// Makes elements. Every text of a run goes through `visible` into a text node: nothing of it is ever markup.

const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Characters that would vanish, break the line or turn the reading direction, shown as what they are. */
function visible(text) {
  return String(text).replace(HIDDEN, (letter) => {
    if (letter === "\n") return "⏎";
    if (letter === "\t") return " ";
    return `⟨U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** h("p", {class: "note"}, "text", node, [more]): null and false are left out. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

/** In place of a part that was not recorded: what is missing, and how to get it. */
const missing = (...text) => h("p", { class: "card missing" }, ...text);

const card = (...content) => h("div", { class: "card" }, ...content);

/** A table; a head is a text, or [text, class] for a column that narrow screens leave out. */
function table(heads, rows, attributes = {}) {
  const head = (each) => {
    const [text, name] = Array.isArray(each) ? each : [each, null];
    return h("th", { scope: "col", class: name }, text);
  };
  return h("table", attributes, h("thead", {}, h("tr", {}, heads.map(head))), h("tbody", {}, rows));
}

/** A row of a table: its head, then cells, which are texts or elements of their own. */
function row(head, cells, attributes = {}) {
  const cell = (each) => (each instanceof HTMLTableCellElement ? each : h("td", {}, each));
  return h("tr", attributes, h("th", { scope: "row" }, head), cells.map(cell));
}

/** A share as a bar; `limit` is a mark on it. Both from 0 to 1. */
function track(share, kind, limit = null) {
  const width = (value) => `${100 * Math.max(0, Math.min(1, value))}%`;
  const bar = h("i", { class: kind });
  bar.style.width = width(share);
  const mark = limit !== null && h("em");
  if (mark) mark.style.left = width(limit);
  return h("span", { class: "track" }, bar, mark);
}

/** Replace what an element holds. */
function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** A part that can be opened; it stays as the reader left it when the page is made anew. `content()` is made on opening. */
function foldable(name, open, attributes, summary, content) {
  const wanted = opened.get(name) ?? open;
  const element = h("details", { ...attributes, open: wanted }, summary, wanted && content());
  let made = wanted;
  element.addEventListener("toggle", () => {
    opened.set(name, element.open);
    if (element.open && !made) append(element, [content()]);
    made ||= element.open;
  });
  return element;
}

const opened = new Map(); // by name

/** A colour of the style sheet, as the theme has it now. */
function color(name) {
  if (!colors.has(name)) {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(--${name})`;
    colors.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colors.get(name);
}

const colors = new Map(); // forgotten when the theme changes

/** A canvas with the sharpness of the screen; sizes in CSS pixels. */
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [pixelsWide, pixelsHigh] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelsWide || canvas.height !== pixelsHigh) {
    canvas.width = pixelsWide;
    canvas.height = pixelsHigh;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** A number for reading: three digits, or what it is if it is none. */
function short(value) {
  if (value === null || value === undefined) return "–";
  const number = asNumber(value);
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "Inf" : "−Inf";
  if (number === 0) return "0";
  const size = Math.abs(number);
  const text = size >= 1e5 || size < 1e-3 ? number.toExponential(2) : String(Number(number.toPrecision(4)));
  return text.replace("e+", "e").replace("-", "−").replace("e-", "e−");
}

/** The record writes what JSON cannot as "nan", "inf", "-inf". */
function asNumber(value) {
  if (typeof value === "number") return value;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? Number(value);
}

function percent(share) {
  if (!Number.isFinite(share)) return "–";
  return share > 0 && share < 0.001 ? "<0.1 %" : `${Number((100 * share).toPrecision(3))} %`;
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

const sentence = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

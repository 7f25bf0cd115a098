// Puts the page together: one run, several, or a server's; theme, keyboard, and following a run that grows.

const PARTS = [
  ["verdict", "Verdict"],
  ["curves", "Curves"],
  ["ranks", "Ranks"],
  ["heatmap", "Heat map"],
  ["tensors", "Tensors"],
  ["model", "Model"],
  ["optimizer", "Optimizer"],
  ["tape", "Tape"],
  ["data", "Data"],
  ["environment", "Environment"],
];

const ui = {
  view: null, // the shared View of the plots on screen
  quantity: "gradient", // of the heat map
  matricesOnly: false,
  picked: null, // {number, step}
  table: { search: "", kind: "gradient", sort: { id: "", down: false } },
};

function section(id, title, ...content) {
  return h("section", { id }, h("h2", { class: "title" }, title), content);
}

// one run --------------------------------------------------------------------------------------------------------

/** Everything about a run; called again with the same run grown longer. */
function showRun(run, again) {
  if (again) ui.view.extend(run.range);
  else {
    ui.view = new View(run.range);
    ui.picked = null;
  }
  const pick = (number, step) => openPanel(run, number, step);
  const focus =
    again && document.activeElement?.id === "search" ? document.activeElement.selectionStart : null;
  ui.run = run;
  const heat = quantitiesOf(run).length ? new Heatmap(run, ui.view, ui, pick) : null;
  ui.heat = heat;
  const table = run.tensors.length ? new TensorTable(run, ui.table, pick) : null;
  const never = "No tensor was measured in this run: it holds loss and learning rate only.";
  fill(
    document.querySelector("main"),
    h("section", { id: "verdict" }, renderNotes(run), renderVerdict(run)),
    section("curves", "Curves", renderCurves(run, ui.view)),
    run.facts.ranks && section("ranks", "Ranks", renderRanks(run)),
    section("heatmap", "Step × layer", heat ? heat.element : missing(never)),
    section("tensors", "Tensors", table ? table.element : missing(never)),
    section(
      "model",
      "Model",
      run.tensors.length || (run.facts.info.parameters || []).length
        ? h("div", { class: "card" }, renderTree(run, pick))
        : missing("No module or parameter is known by name."),
    ),
    section("optimizer", "Optimizer", renderOptimizer(run, pick)),
    section("tape", "Tape", renderTape(run)),
    section("data", "Data", renderData(run)),
    section("environment", "Environment", renderEnvironment(run)),
  );
  if (focus !== null) {
    const search = document.getElementById("search");
    search.focus();
    search.setSelectionRange(focus, focus);
  }
  if (ui.picked) openPanel(run, ui.picked.number, ui.picked.step);
  renderHeader(run);
}

const FRESH = 60; // seconds since the last row within which a run without an end is taken to be alive

const sinceWritten = ({ facts }) => (facts.status.written ? Date.now() / 1000 - facts.status.written : NaN);
const isFresh = (run) => page.live && !run.facts.status.ended && sinceWritten(run) < FRESH;

/** What a reader must know before anything else: an end that was not recorded, rows that could not be read. */
function renderNotes(run) {
  const { status, notes } = run.facts;
  const lines = [...notes];
  const ago = sinceWritten(run);
  if (!status.ended && !isFresh(run)) {
    const written = Number.isFinite(ago) && ago >= 0 ? `; the last row was written ${duration(ago)} ago` : "";
    lines.unshift(`No end was recorded: it is still running, or its process was killed${written}.`);
  }
  const paragraphs = lines.map((line) => h("p", {}, line));
  return lines.length ? h("div", { class: "notice", role: "note" }, paragraphs) : null;
}

function openPanel(run, number, step) {
  ui.picked = { number, step: step ?? run.last.steps[number] };
  const panel = renderTensor(
    run,
    ui.view,
    number,
    ui.picked.step,
    (other, at) => openPanel(run, other, at),
    closePanel,
  );
  fill(document.getElementById("panel"), panel);
  makeRoom(true);
  if (ui.heat) ui.heat.drawCursor();
}

function closePanel() {
  ui.picked = null;
  document.getElementById("panel").replaceChildren();
  makeRoom(false);
  if (ui.heat) ui.heat.drawCursor();
}

/** The page beside the panel is narrower, and so longer: what the reader looks at stays where it is. */
function makeRoom(wanted) {
  if (document.body.classList.contains("with-panel") === wanted) return;
  const looked = [...document.querySelectorAll("main section")].findLast(
    (each) => each.getBoundingClientRect().top < innerHeight / 2,
  );
  const before = looked?.getBoundingClientRect().top;
  document.body.classList.toggle("with-panel", wanted);
  if (looked) window.scrollBy({ top: looked.getBoundingClientRect().top - before, behavior: "instant" });
}

function renderHeader(run) {
  const { status, steps } = run.facts;
  const state = status.ended
    ? status.exit_code
      ? `ended with ${status.exit_code}`
      : "ended"
    : isFresh(run)
      ? "live"
      : "no end recorded";
  fill(
    document.getElementById("about"),
    h("b", {}, run.name),
    h("span", { class: `chip ${state === "live" ? "running" : ""}` }, state),
    h(
      "span",
      { class: "hint" },
      [plural(steps, "step"), duration(status.seconds)].filter(Boolean).join(" · "),
    ),
  );
  document.title = `${visible(run.name)} · gradproof`;
  fill(
    document.getElementById("parts"),
    PARTS.filter(([id]) => document.getElementById(id)).map(([id, label]) => h("a", { href: `#${id}`, onclick: (event) => jump(event, id) }, label)),
  );
}

function jump(event, id) {
  event.preventDefault();
  document.getElementById(id).scrollIntoView({ behavior: "smooth" });
}

// several runs ---------------------------------------------------------------------------------------------------

function showComparison(runs, comparison) {
  closePanel();
  ui.heat = null;
  const { view, nodes } = renderComparison(runs, comparison, (run, place) => page.open(place, run));
  ui.view = view;
  fill(document.querySelector("main"), nodes);
  fill(
    document.getElementById("about"),
    h("b", {}, plural(runs.length, "run")),
    h("span", { class: "hint" }, "compared with the first"),
  );
  fill(document.getElementById("parts"));
  document.title = "comparison · gradproof";
}

/** Buttons to go from run to run of a file that holds several. */
function renderTabs(entries, current) {
  fill(
    document.getElementById("runs"),
    entries.map(([label, open], place) =>
      h("button", { class: place === current ? "tab on" : "tab", onclick: open }, label),
    ),
  );
}

// a page as a file -----------------------------------------------------------------------------------------------

async function openFile(packed) {
  const runs = await Promise.all(packed.runs.map(unpackRun));
  const tabs = (current) => {
    if (runs.length < 2) return;
    const entries = runs.map((run, place) => [packed.comparison.labels[place], () => page.open(place, run)]);
    renderTabs([["Comparison", compare], ...entries], current);
  };
  const compare = () => {
    showComparison(runs, packed.comparison);
    tabs(0);
  };
  page.open = (place, run) => {
    showRun(run, false);
    tabs(place + 1);
    window.scrollTo(0, 0);
  };
  if (runs.length > 1) compare();
  else page.open(0, runs[0]);
}

// keyboard, theme ------------------------------------------------------------------------------------------------

const KEYS = [
  ["←  →", "move along the steps"],
  ["+  −", "zoom in and out"],
  ["0", "the whole run"],
  ["drag", "zoom to a stretch; with shift: move"],
  ["ctrl + wheel", "zoom at the pointer"],
  ["/", "search tensors"],
  ["d", "dark, light"],
  ["Esc", "close"],
  ["?", "this help"],
];

function handleKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  const help = document.getElementById("help");
  if (event.key === "Escape") {
    if (help.open) help.close();
    else if (typing) event.target.blur();
    else closePanel();
    return;
  }
  if (typing || !ui.view) return;
  const actions = {
    ArrowLeft: () => ui.view.panBy(-0.2),
    ArrowRight: () => ui.view.panBy(0.2),
    "+": () => ui.view.zoomBy(0.6),
    "=": () => ui.view.zoomBy(0.6),
    "-": () => ui.view.zoomBy(1 / 0.6),
    0: () => ui.view.reset(),
    "/": () => document.getElementById("search")?.focus(),
    "?": () => help.showModal(),
    d: switchTheme,
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("gradproof-theme", root.dataset.theme);
  } catch {
    // a page from a file may have no storage
  }
  redraw();
}

/** Colours of canvases come from the theme. */
function redraw() {
  colors.clear();
  ui.view?.tell();
  document.querySelectorAll("canvas.spark").forEach((canvas) => ui.run && drawSpark(ui.run, canvas));
}

/** When the browser has drawn what was made. */
const drawn = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));

const page = { live: false, open: null };
const ready = { interactive: 0 }; // milliseconds from the beginning of loading

async function start() {
  try {
    const kept = localStorage.getItem("gradproof-theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch {
    // as above
  }
  document.addEventListener("keydown", handleKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("ask").addEventListener("click", () => document.getElementById("help").showModal());
  fill(
    document.getElementById("keys"),
    KEYS.map(([keys, what]) => h("div", {}, h("dt", {}, keys), h("dd", {}, what))),
  );
  const header = document.querySelector("header");
  const leaveRoom = () => (document.documentElement.style.scrollPaddingTop = `${header.offsetHeight + 20}px`);
  new ResizeObserver(leaveRoom).observe(header); // a part that is jumped to must not hide below it
  const packed = JSON.parse(document.getElementById("data").textContent);
  try {
    await (packed.live ? openLive(packed) : openFile(packed));
    await drawn();
    ready.interactive = performance.now();
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    showFailure(error);
  }
}

function showFailure(error) {
  const notice = h("p", { class: "notice" }, `The page could not be built: ${error.message}`);
  document.querySelector("main").prepend(notice);
  console.error(error);
}

start();

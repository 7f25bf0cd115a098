// The same page from `gradproof live`: a list of runs, and the one that is looked at follows its record as it grows.

async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(`${path}: ${(await answer.text()) || answer.status}`);
  return answer.json();
}

async function openLive(packed) {
  page.live = true;
  const only = packed.only; // the server was started for one run
  window.addEventListener("hashchange", () => follow(only));
  await follow(only);
}

/** #run/NAME, #compare/NAME/NAME…, or the list. */
async function follow(only) {
  stopFollowing();
  const [what, ...names] = location.hash.slice(1).split("/").map(decodeURIComponent);
  renderTabs(only ? [] : [["All runs", () => (location.hash = "")]], -1);
  if (what === "compare" && names.length > 1) return compareLive(names);
  if (what === "run" && names.length) return followRun(names[0]);
  return only ? followRun(only) : listRuns();
}

let source = null;
let timer = null;

function stopFollowing() {
  source?.close();
  clearTimeout(timer);
  source = null;
}

/** Show a run, and again each time the server says that it has grown. */
async function followRun(name) {
  const query = `run=${encodeURIComponent(name)}`;
  let shown = false;
  let version = "";
  let loading = Promise.resolve();
  const load = async () => {
    const packed = await ask(`data?${query}`);
    if (packed.version === version) return;
    version = packed.version;
    showRun(await unpackRun(packed), shown);
    shown = true;
  };
  await load();
  const stream = new EventSource(`events?${query}&since=${encodeURIComponent(version)}`);
  stream.addEventListener("grown", () => (loading = loading.then(load)));
  stream.addEventListener("ended", () => stream.close());
  source = stream;
}

async function listRuns() {
  closePanel();
  ui.view = null;
  const { runs, directory } = await ask("runs");
  const chosen = new Set([...document.querySelectorAll("main input:checked")].map((box) => box.value));
  const button = h("button", { class: "primary", onclick: () => (location.hash = `compare/${[...chosen].map(encodeURIComponent).join("/")}`) }, "Compare the chosen");
  const count = () => (button.disabled = chosen.size < 2);
  const rows = runs.map((run) => {
    const box = h("input", { type: "checkbox", value: run.name, "aria-label": `choose ${run.name}`, onchange: (event) => {
      if (event.target.checked) chosen.add(run.name);
      else chosen.delete(run.name);
      count();
    } });
    box.checked = chosen.has(run.name);
    return h(
      "tr",
      {},
      h("td", {}, box),
      h("th", { scope: "row" }, h("a", { href: `#run/${encodeURIComponent(run.name)}` }, run.name)),
      h("td", {}, h("span", { class: run.ended ? "chip" : "chip running" }, run.ended ? "ended" : "no end yet")),
      h("td", {}, run.steps.toLocaleString("en")),
      h("td", {}, short(run.loss)),
      h("td", { class: "wide" }, new Date(1000 * run.written).toISOString().replace("T", " ").slice(0, 19)),
    );
  });
  count();
  fill(
    document.querySelector("main"),
    section("list", "Runs", rows.length
      ? h("div", { class: "card" }, h("div", { class: "bar" }, button, h("span", { class: "hint" }, directory)), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "run", "", "steps", "last loss", "last written, UTC"].map((each, i) => h("th", { class: i === 5 && "wide" }, each)))), h("tbody", {}, rows))))
      : missing("There is no run here yet. gradproof run SCRIPT makes one; this list updates itself.")),
  );
  fill(document.getElementById("about"), h("b", {}, plural(runs.length, "run")));
  fill(document.getElementById("parts"));
  timer = setTimeout(listRuns, 3000);
}

async function compareLive(names) {
  const packed = await ask(`compare?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`);
  const runs = await Promise.all(packed.runs.map(unpackRun));
  page.open = (place) => (location.hash = `run/${encodeURIComponent(names[place])}`);
  showComparison(runs, packed.comparison);
}

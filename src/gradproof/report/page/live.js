// The same page from `gradproof live`: a list of runs, and the one that is looked at follows its record as it grows.

async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(`${path}: ${(await answer.text()) || answer.status}`);
  return answer.json();
}

async function openLive(packed) {
  page.live = true;
  window.addEventListener("hashchange", () => follow(packed.only).catch(showFailure));
  await follow(packed.only);
}

const following = { turn: 0, stream: null, timer: null, chosen: new Set() };

/** What was being followed is left; answers that are still on their way to it find another turn. */
function stopFollowing() {
  following.stream?.close();
  clearTimeout(following.timer);
  following.stream = null;
  return ++following.turn;
}

/** #run/NAME, #compare/NAME/NAME…, or the list of runs; `only` is the one run that a server was started for. */
async function follow(only) {
  const [what, ...names] = location.hash.slice(1).split("/").map(decodeURIComponent);
  if (what && !["run", "compare"].includes(what)) return; // a part of the page
  const turn = stopFollowing();
  renderTabs(only || !what ? [] : [["← All runs", () => (location.hash = "")]], -1);
  if (what === "compare" && names.length > 1) await compareLive(names, turn);
  else if (what === "run" && names.length) await followRun(names[0], turn);
  else await (only ? followRun(only, turn) : listRuns(turn));
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Show a run, and again each time the server says that it has grown. */
async function followRun(name, turn) {
  const query = `run=${encodeURIComponent(name)}`;
  let shown = false;
  let version = "";
  let loading = Promise.resolve();
  const show = (run) => {
    showRun(run, shown);
    shown = true;
    clearTimeout(following.timer);
    // a run that stands still for too long is no longer called live
    if (isFresh(run)) following.timer = setTimeout(() => show(run), 1000 * (FRESH + 1));
  };
  const load = async () => {
    const packed = await ask(`data?${query}`);
    if (packed.version === version) return;
    version = packed.version;
    const run = await unpackRun(packed);
    while (document.querySelector(".selection")) await pause(200); // somebody is marking a stretch
    if (turn === following.turn) show(run);
  };
  await load();
  if (turn !== following.turn) return;
  const stream = new EventSource(`events?${query}&since=${encodeURIComponent(version)}`);
  stream.addEventListener("grown", () => (loading = loading.then(load).catch(showFailure)));
  stream.addEventListener("ended", () => stream.close());
  following.stream = stream;
}

async function listRuns(turn) {
  const { runs, directory } = await ask("runs");
  if (turn !== following.turn) return;
  closePanel();
  ui.view = null;
  const { chosen } = following;
  const compare = () => (location.hash = `compare/${[...chosen].map(encodeURIComponent).join("/")}`);
  const button = h("button", { class: "primary", onclick: compare }, "Compare the chosen");
  const choose = (name, wanted) => {
    if (wanted) chosen.add(name);
    else chosen.delete(name);
    button.disabled = chosen.size < 2;
  };
  button.disabled = chosen.size < 2;
  const heads = ["run", "", "steps", "last loss", ["last written, UTC", "wide"]];
  const list = table(
    heads,
    runs.map((run) => renderListed(run, chosen.has(run.name), choose)),
  );
  const empty = missing(
    "There is no run here yet. gradproof run SCRIPT makes one; this list updates itself.",
  );
  const bar = h("div", { class: "bar" }, button, h("span", { class: "hint" }, directory));
  fill(
    document.querySelector("main"),
    section("list", "Runs", runs.length ? card(bar, h("div", { class: "scroll" }, list)) : empty),
  );
  fill(document.getElementById("about"), h("b", {}, plural(runs.length, "run")));
  fill(document.getElementById("parts"));
  following.timer = setTimeout(() => listRuns(turn).catch(showFailure), 3000);
}

function renderListed(run, isChosen, choose) {
  const box = h("input", {
    type: "checkbox",
    "aria-label": `choose ${run.name}`,
    onchange: (event) => choose(run.name, event.target.checked),
  });
  box.checked = isChosen;
  const state = h("span", { class: run.ended ? "chip" : "chip running" }, run.ended ? "ended" : "no end yet");
  const written = new Date(1000 * run.written).toISOString().replace("T", " ").slice(0, 19);
  const link = h("a", { href: `#run/${encodeURIComponent(run.name)}` }, run.name);
  const cells = [state, run.steps.toLocaleString("en"), short(run.loss), h("td", { class: "wide" }, written)];
  return row([box, " ", link], cells);
}

async function compareLive(names, turn) {
  const packed = await ask(`compare?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`);
  const runs = await Promise.all(packed.runs.map(unpackRun));
  if (turn !== following.turn) return;
  page.open = (place) => (location.hash = `run/${encodeURIComponent(names[place])}`);
  showComparison(runs, packed.comparison);
}

// The model as a tree, each module with what is known about its health.

const GRAVITY = { problem: 3, warning: 2, note: 1, fine: 0 };

/** For each module or parameter by name: [level, words] of what is remarkable about it. */
function findHealth(run) {
  const health = new Map();
  const say = (name, level, words) => {
    if (!health.has(name)) health.set(name, []);
    health.get(name).push([level, words]);
  };
  for (const cause of run.facts.diagnosis.causes) {
    const place = cause.where && cause.where.split(" (")[0];
    if (place) say(place, cause.level, cause.id);
  }
  for (const parameter of run.facts.info.parameters || []) {
    if (!parameter.trainable) say(parameter.name, "note", "frozen");
    else if (parameter.optimizer === null) say(parameter.name, "warning", "no optimizer has it");
    else if (!parameter.gradient) say(parameter.name, "warning", "no gradient came");
    else if (parameter.changed === false) say(parameter.name, "warning", "did not change");
  }
  run.tensors.forEach((tensor, number) => {
    const flags = run.badness(number);
    const level = tensor.kind.startsWith("output") ? "warning" : "problem";
    if (flags) say(tensor.name, level, `${KIND_WORDS[tensor.kind] || tensor.kind}: ${badWords(flags)}`);
    const dead = tensor.kind === "output" ? run.lastOf(number, "dead") : NaN;
    if (dead >= 0.9) say(tensor.name, "note", `${percent(dead)} of its units put out one number`);
  });
  return health;
}

/** Names with dots as nested nodes, in the order of execution. */
function growTree(run) {
  const root = { children: new Map(), name: "" };
  const names = new Set(run.facts.order.map((number) => run.tensors[number].name));
  for (const parameter of run.facts.info.parameters || []) names.add(parameter.name);
  for (const name of names) {
    let node = root;
    const parts = name.split(".");
    parts.forEach((part, depth) => {
      if (!node.children.has(part)) {
        node.children.set(part, {
          label: part,
          name: parts.slice(0, depth + 1).join("."),
          children: new Map(),
        });
      }
      node = node.children.get(part);
    });
  }
  return root;
}

function renderTree(run, onPick) {
  const health = findHealth(run);
  const modules = new Map(run.tensors.filter((each) => each.module).map((each) => [each.name, each.module]));
  const root = growTree(run);

  const judge = (node) => {
    node.own = health.get(node.name) || [];
    node.worst = Math.max(0, ...node.own.map(([level]) => GRAVITY[level]));
    node.entries = entriesOf(run, node);
    node.below = new Map(); // what is said about parts: [level, words] -> how often
    for (const child of node.children.values()) {
      judge(child);
      node.worst = Math.max(node.worst, child.worst);
      node.entries += child.entries;
      for (const [level, words] of child.own) count(node.below, `${level} ${words}`, 1);
      for (const [said, times] of child.below) count(node.below, said, times);
    }
  };
  judge(root);

  const render = (node, depth) => {
    const level = Object.keys(GRAVITY).find((each) => GRAVITY[each] === node.worst);
    const number = ["gradient", "output", "weight"]
      .map((kind) => run.number(kind, node.name))
      .find((each) => each !== undefined);
    const label = [
      h("i", { class: `dot ${level}`, title: level }),
      number === undefined
        ? h("span", {}, node.label)
        : h("button", { class: "name", onclick: () => onPick(number, null) }, node.label),
      modules.has(node.name) && h("small", {}, modules.get(node.name)),
      node.entries > 0 && h("small", {}, readable(node.entries)),
      node.own.map(([each, words]) => h("span", { class: `words ${each}` }, words)),
      [...node.below].map(([said, times]) => {
        const [each, words] = [said.slice(0, said.indexOf(" ")), said.slice(said.indexOf(" ") + 1)];
        return h("span", { class: `words below ${each}` }, times > 1 ? `${times} × ${words}` : words);
      }),
    ];
    if (!node.children.size) return h("li", {}, h("div", { class: "leaf" }, label));
    const open = node.worst === GRAVITY.problem || (depth < 1 && root.children.size < 3);
    const children = () =>
      h(
        "ul",
        {},
        [...node.children.values()].map((child) => render(child, depth + 1)),
      );
    return h("li", {}, foldable(`module ${node.name}`, open, {}, h("summary", {}, label), children));
  };
  return h(
    "ul",
    { class: "tree" },
    [...root.children.values()].map((child) => render(child, 0)),
  );
}

function count(counts, said, times) {
  counts.set(said, (counts.get(said) || 0) + times);
}

function entriesOf(run, node) {
  const shape = node.children.size ? null : run.parameter(node.name)?.shape;
  return shape ? shape.reduce((product, size) => product * size, 1) : 0;
}

/** 1,234,567 parameters as 1.23M. */
function readable(count) {
  const [divisor, letter] =
    count >= 1e9 ? [1e9, "B"] : count >= 1e6 ? [1e6, "M"] : count >= 1e4 ? [1e3, "k"] : [1, ""];
  return `${Number((count / divisor).toPrecision(3))}${letter}`;
}

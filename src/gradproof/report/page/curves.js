// The curves of a run: loss, learning rate, gradient norm and clip, and whatever else was recorded at every step.

function renderCurves(run, view) {
  const { marks, spikes } = run.facts;
  const several = new Set(run.curves.map((curve) => curve.track)).size > 1;
  const lines = (id, styles = {}) =>
    run.curvesOf(id).map((curve, place) => ({
      ...curve,
      label: several && curve.track ? `${curve.track}: ${curve.label}` : curve.label,
      color: ["curve", "curve-2", "curve-3"][place % 3],
      ...styles,
    }));
  const plots = [];
  const add = (title, parts, options) => {
    const all = parts.flat();
    if (all.length) plots.push(new Plot(view, all, { title, marks, ...options }).element);
  };
  const smoothed = lines("loss_smooth", { width: 2 });
  const raw = lines("loss", smoothed.length ? { alpha: 0.4, width: 1 } : {});
  const jumps = spikes.length && [
    {
      label: plural(spikes.length, "spike"),
      steps: spikes.map((s) => s.step),
      values: spikes.map((s) => s.value),
      color: "warning",
      pointsOnly: true,
    },
  ];
  add("Loss", [raw, smoothed, jumps || []], {
    log: "auto",
    height: 220,
    hint: thinnedHint(run.curvesOf("loss")),
  });
  add("Learning rate", [lines("lr")], { log: false });
  const before = lines("norm_before_clip", { color: "curve-2", alpha: 0.9 });
  add(
    "Gradient norm",
    [before, lines("grad_norm"), lines("clip_limit", { color: "faint", dash: [5, 4], width: 1 })],
    { log: true },
  );
  add("Clip rate", [lines("clip_rate")], { zeroToOne: true });
  add(
    "Update / weight",
    [lines("update_ratio", { points: run.curvesOf("update_ratio").some((c) => c.steps.length < 60) })],
    { log: true },
  );
  add(
    "Cosine of successive gradients",
    [lines("cosine", { points: run.curvesOf("cosine").some((c) => c.steps.length < 60) })],
    {},
  );
  add("Loss scale", [lines("loss_scale")], { log: true });
  run.curvesOf("noted").forEach((curve) =>
    add(visible(curve.label), [[{ ...curve, color: "curve-3", points: curve.steps.length < 60 }]], {
      log: "auto",
      hint: "noted by the script",
    }),
  );
  return plots.length ? h("div", { class: "plots" }, plots) : missing("No curve was recorded.");
}

function thinnedHint(curves) {
  const all = curves.reduce((sum, curve) => sum + curve.of, 0);
  const kept = curves.reduce((sum, curve) => sum + curve.steps.length, 0);
  return kept < all
    ? `${kept.toLocaleString("en")} of ${all.toLocaleString("en")} points; the lowest and highest of every stretch are kept`
    : null;
}

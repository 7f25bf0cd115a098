// What the taped steps showed: the first bad operation, gradients against float64, experiments, batches.

function renderTape(run) {
  const { verdicts, shadow } = run.facts;
  const asked = verdicts.length || shadow;
  if (!asked)
    return missing(
      "No step of this run was taped. gradproof run SCRIPT tapes the first steps and some later ones; --until STEP tapes the one you want.",
    );
  const born = verdicts.find(
    (each) => each.experiment === "where_was_it_born" && each.verdict === "confirmed",
  );
  return [born && renderFirstBad(born), shadow && renderShadow(shadow), renderQuestions(verdicts)];
}

function renderFirstBad(verdict) {
  return h(
    "div",
    { class: "card" },
    h("h3", {}, "The first bad operation", h("small", {}, ` step ${verdict.step}`)),
    verdict.where && h("p", {}, h("code", {}, verdict.where)),
    renderLines(verdict.evidence),
  );
}

/** The error of each parameter's gradient against float64, with what rounding allows. */
function renderShadow(shadow) {
  const size = (p) => asNumber(p.error);
  const judged = [...shadow.parameters].sort((a, b) => (size(b) || 0) - (size(a) || 0));
  const place = (value) => Math.max(0, Math.min(100, (100 * (Math.log10(Math.max(value, 1e-17)) + 17)) / 18));
  const rows = judged.slice(0, 100).map((p) => {
    const right = p.verdict === "right" || p.verdict === "zero in truth";
    const bar = h("i", { class: right ? "after" : "before" });
    bar.style.width = `${place(size(p))}%`;
    const limit = h("em");
    limit.style.left = `${place(asNumber(p.tolerance))}%`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, p.name),
      h("td", { class: right ? "good" : "bad" }, p.verdict),
      h("td", {}, short(p.error)),
      h("td", { class: "wide" }, short(p.tolerance)),
      h("td", { class: "errors wide" }, h("span", { class: "track" }, bar, limit)),
      h("td", { class: "wide" }, p.pattern),
    );
  });
  return h(
    "div",
    { class: "card" },
    h("h3", {}, "Every gradient against float64", h("small", {}, ` step ${shadow.step}`)),
    h(
      "p",
      { class: "hint" },
      `loss ${short(shadow.loss)}, in float64 ${short(shadow.true_loss)}; relative error of each gradient, worst first, and what rounding allows`,
    ),
    h(
      "div",
      { class: "scroll short" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, "parameter"),
            h("th", {}, ""),
            h("th", {}, "error"),
            h("th", { class: "wide" }, "allowed"),
            h("th", { class: "wide" }, "10⁻¹⁷ … 10"),
            h("th", { class: "wide" }, ""),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
    judged.length > 100 && h("p", { class: "hint" }, `the worst 100 of ${judged.length}`),
    (shadow.notes || []).map((note) => h("p", { class: "hint" }, note)),
  );
}

/** What each experiment was asked and what it answered last. */
function renderQuestions(verdicts) {
  if (!verdicts.length) return null;
  const order = { confirmed: 0, undecided: 1, excluded: 2 };
  const sorted = [...verdicts].sort((a, b) => order[a.verdict] - order[b.verdict]);
  return h(
    "div",
    { class: "card" },
    h("h3", {}, "Asked of the taped steps"),
    h(
      "dl",
      { class: "questions" },
      sorted.map((each) =>
        h(
          "div",
          {},
          h("dt", {}, `${sentence((each.experiment || "").replaceAll("_", " "))}?`),
          h(
            "dd",
            {},
            h("span", { class: `chip ${each.verdict}` }, each.verdict),
            h("code", {}, each.id || each.family),
            " ",
            each.reason || (each.evidence || [])[0] || "",
            h("small", {}, ` step ${each.step}`),
          ),
        ),
      ),
    ),
  );
}

function renderData(run) {
  const { alignment, verdicts } = run.facts;
  const about = verdicts.filter((each) =>
    ["data-target-misaligned", "data-order-or-sampling", "loss-mask-error", "input-or-target-scale"].includes(
      each.family,
    ),
  );
  const words =
    about.length > 0 &&
    h(
      "div",
      { class: "card" },
      h("h3", {}, "What the taped batches say"),
      h(
        "dl",
        { class: "questions" },
        about.map((each) =>
          h(
            "div",
            {},
            h("dt", {}, each.family),
            h(
              "dd",
              {},
              h("span", { class: `chip ${each.verdict}` }, each.verdict),
              each.reason || (each.evidence || [])[0] || "",
            ),
          ),
        ),
      ),
    );
  if (!alignment)
    return [
      missing(
        "No table of lags: it is made where token sequences and their targets are seen on a taped step.",
      ),
      words,
    ];
  const rows = alignment.shares.map(([lag, share]) => {
    const bar = h("i", { class: lag === 1 ? "after" : "before" });
    bar.style.width = `${100 * share}%`;
    const meaning =
      {
        "-1": "the token before",
        0: "the same token",
        1: "the next token: what a language model predicts",
        2: "the token after next",
      }[lag] || "";
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, lag > 0 ? `+${lag}` : String(lag).replace("-", "−")),
      h("td", {}, percent(share)),
      h("td", { class: "errors" }, h("span", { class: "track" }, bar)),
      h("td", { class: "wide" }, meaning),
    );
  });
  return [
    h(
      "div",
      { class: "card" },
      h("h3", {}, "How far the targets are ahead of the inputs", h("small", {}, ` step ${alignment.step}`)),
      h(
        "table",
        { class: "lags" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["positions ahead", "of the targets", "", ""].map((each, i) =>
              h("th", { class: i === 3 && "wide" }, each),
            ),
          ),
        ),
        h("tbody", {}, rows),
      ),
      alignment.where && h("p", { class: "hint" }, alignment.where),
    ),
    words,
  ];
}

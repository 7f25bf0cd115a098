// What the taped steps showed: the first bad operation, gradients against float64, experiments, batches.

function renderTape(run) {
  const { verdicts, shadow } = run.facts;
  const asked = verdicts.length || shadow;
  const { taped } = run.facts.diagnosis.examination;
  if (!asked && taped)
    return missing(`${plural(taped, "step")} taped; no question had anything to say for or against a cause.`);
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
  return card(
    h("h3", {}, "The first bad operation", h("small", {}, ` step ${verdict.step}`)),
    verdict.where && h("p", {}, h("code", {}, verdict.where)),
    renderLines(verdict.evidence || []),
  );
}

const MOST_GRADIENTS = 100;

/** The error of each parameter's gradient against float64, with what rounding allows; from 1e-17 to 10. */
function renderShadow(shadow) {
  const size = (parameter) => asNumber(parameter.error) || 0;
  const sorted = [...shadow.parameters].sort((a, b) => size(b) - size(a));
  const place = (value) => (Math.log10(Math.max(asNumber(value), 1e-17)) + 17) / 18;
  const rows = sorted.slice(0, MOST_GRADIENTS).map(({ name, verdict, error, tolerance, pattern }) => {
    const right = verdict === "right" || verdict === "zero in truth";
    return row(name, [
      h("td", { class: right ? "good" : "bad" }, verdict),
      short(error),
      h("td", { class: "wide" }, short(tolerance)),
      h("td", { class: "errors wide" }, track(place(error), right ? "after" : "before", place(tolerance))),
      h("td", { class: "wide" }, pattern),
    ]);
  });
  const heads = ["parameter", "", "error", ["allowed", "wide"], ["10⁻¹⁷ … 10", "wide"], ["", "wide"]];
  return card(
    h("h3", {}, "Every gradient against float64", h("small", {}, ` step ${shadow.step}`)),
    h(
      "p",
      { class: "hint" },
      `loss ${short(shadow.loss)}, in float64 ${short(shadow.true_loss)}; `,
      "relative error of each gradient, worst first, and what rounding allows",
    ),
    h("div", { class: "scroll short" }, table(heads, rows)),
    sorted.length > rows.length && h("p", { class: "hint" }, `the worst ${rows.length} of ${sorted.length}`),
    (shadow.notes || []).map((note) => h("p", { class: "hint" }, note)),
  );
}

/** What each experiment was asked and what it answered last. */
function renderQuestions(verdicts) {
  if (!verdicts.length) return null;
  const order = ["confirmed", "undecided", "excluded"];
  const sorted = [...verdicts].sort((a, b) => order.indexOf(a.verdict) - order.indexOf(b.verdict));
  const question = ({ experiment }) => `${sentence((experiment || "").replaceAll("_", " "))}?`;
  return card(h("h3", {}, "Asked of the taped steps"), renderAnswers(sorted, question));
}

/** Verdicts, each under a title. */
function renderAnswers(verdicts, title) {
  const answer = (each) => [
    h("span", { class: `chip ${each.verdict}` }, each.verdict),
    h("code", {}, each.id || each.family),
    ` ${each.reason || (each.evidence || [])[0] || ""}`,
    h("small", {}, ` step ${each.step}`),
  ];
  const entries = verdicts.map((each) => h("div", {}, h("dt", {}, title(each)), h("dd", {}, answer(each))));
  return h("dl", { class: "questions" }, entries);
}

const ABOUT_DATA = [
  "data-target-misaligned",
  "data-order-or-sampling",
  "loss-mask-error",
  "input-or-target-scale",
];

function renderData(run) {
  const { alignment, verdicts } = run.facts;
  const about = verdicts.filter((each) => ABOUT_DATA.includes(each.family));
  return [
    alignment
      ? renderAlignment(alignment)
      : missing(
          "No table of lags: it is made where a taped step has token sequences and a target for each token.",
        ),
    about.length > 0 &&
      card(
        h("h3", {}, "What the taped batches say"),
        renderAnswers(about, (each) => each.family),
      ),
  ];
}

const LAGS = {
  "-1": "the token before",
  0: "the same token",
  1: "the next token: what a language model predicts",
  2: "the token after next",
};

/** How often a target is the input token so many positions further on. */
function renderAlignment({ step, shares, where }) {
  const rows = shares.map(([lag, share]) =>
    row(lag > 0 ? `+${lag}` : String(lag).replace("-", "−"), [
      percent(share),
      h("td", { class: "errors" }, track(share, lag === 1 ? "after" : "before")),
      h("td", { class: "wide" }, LAGS[lag] || ""),
    ]),
  );
  return card(
    h("h3", {}, "How far the targets are ahead of the inputs", h("small", {}, ` step ${step}`)),
    h(
      "div",
      { class: "scroll" },
      table(["positions ahead", "of the targets", "", ["", "wide"]], rows, { class: "lags" }),
    ),
    where && h("p", { class: "hint" }, where),
  );
}

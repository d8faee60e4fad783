// The tables of a benchmark's report. Needs dom.js.
function ratio(value) { return Number.isFinite(value) ? `${value.toFixed(2)}\u00d7` : DASH; }

// A speedup with its spread under it; plain decoding's own is 1 and has none.
function speedupCell(section, fast) {
  if (!fast) return DASH;
  const range = `${fast.low.toFixed(2)}\u2026${fast.high.toFixed(2)}`;
  const spread = section.reference ? "" : fast.num_pairs === 1 ? "1 request" : range;
  return two(ratio(fast.ratio), spread, pace(fast));
}

function pace(fast) {
  return fast.ratio > 1.02 ? "faster" : fast.ratio < 0.98 ? "slower" : "";
}

// columns: [{ title, formula, cell(row) → text or node, name }]
function dataTable(label, columns, rows, rowName) {
  const head = h("tr", {}, ...columns.map((column) => h("th", { title: column.formula,
    class: column.name ?? "num", scope: "col" }, column.title)));
  const body = rows.map((row) => h("tr", { "data-row": rowName(row) },
    ...columns.map((column, i) => {
      const shown = column.cell(row);
      return h(i === 0 ? "th" : "td", { class: column.name ?? "num", title: column.hint?.(row),
        scope: i === 0 ? "row" : null }, shown);
    })));
  return h("div", { class: "frame", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, head), h("tbody", {}, ...body)));
}

function two(first, second, name = "") {
  return h("span", { class: `two ${name}` }, first, h("small", {}, second));
}

function nameCell(section, colour) {
  return h("span", { class: "who", title: section.title },
    h("i", { style: `background:${colour(section.name)}` }), section.name);
}

// Why answers differ from plain decoding's, and how bad that is.
const CAUSES = { "near ties": ["near-ties", "lossy"], fault: ["a fault", "bad"],
  unknown: ["unexplained", "lossy"] };

function verdictCell(section) {
  const verdict = section.verdict;
  if (!verdict) return section.reference ? "reference" : DASH;
  if (!verdict.cause) return h("span", { class: "good" }, "identical");
  const words = `${verdict.num_identical} of ${verdict.num_compared}`;
  if (!section.lossless) return two(words, "lossy by design", "lossy");
  const [why, name] = CAUSES[verdict.cause];
  return two(words, why, name);
}

// onDeploy(section) is told when a configuration is to be handed over.
function summaryTable(report, formulas, colour, onDeploy) {
  const columns = [
    { title: "configuration", name: "text", cell: (s) => nameCell(s, colour) },
    { title: "speedup", formula: `${formulas.speedup}; below it: ${formulas.spread}`,
      cell: (s) => speedupCell(s, s.overall.speedup) },
    { title: "mean of ratios", formula: formulas.mean_of_ratios,
      cell: (s) => ratio(s.overall.speedup?.mean_of_ratios) },
    { title: "MAT", formula: `${formulas.mat}; below it: new tokens / steps`,
      cell: ({ overall }) => two(number(overall.mat, 2),
        `${overall.num_new_tokens} / ${overall.num_steps}`) },
    { title: "accepted", formula: formulas.draft_acceptance,
      cell: (s) => percent(s.draft_acceptance) },
    { title: "tok/s", formula: formulas.tok_s, cell: (s) => number(s.overall.tok_s, 1) },
    { title: "step", formula: formulas.step_ms, cell: (s) => duration(s.overall.step_ms ?? NaN) },
    { title: "draft / verify / other", formula: formulas.split_ms, cell: (s) => splitCell(s) },
    { title: "TTFT", formula: formulas.ttft_ms, cell: (s) => duration(s.ttft_ms ?? NaN) },
    { title: "ITL", formula: formulas.itl_ms, cell: (s) => duration(s.itl_ms ?? NaN) },
    { title: "answers", formula: formulas.verdict, name: "text", cell: (s) => verdictCell(s) },
    { title: "", name: "text", cell: (s) => (s.reference || !s.example_run ? ""
      : h("button", { type: "button", class: "quiet", "data-do": "deploy", onclick: () => onDeploy(s),
        title: `${s.name} as a config for a serving engine`, "aria-label": `deploy ${s.name}` },
      "deploy")) },
  ];
  return dataTable("Summary", columns, report.configurations, (s) => s.name);
}

function splitCell(section) {
  const split = section.split_ms;
  if (!split) return DASH;
  const parts = [split.draft, split.verify, split.accept + split.other];
  const total = parts.reduce((sum, part) => sum + part, 0);
  const bar = h("span", { class: "split", "aria-hidden": "true" },
    ...["draft", "verify", "other"].map((name, i) =>
      h("i", { class: name, style: `width:${total ? 100 * parts[i] / total : 0}%` })));
  return h("span", { class: "two" }, bar,
    h("small", {}, `${parts.map(milliseconds).join(" / ")} ms`));
}

// Spec-Bench's table: a column per kind of task.
function groupTable(report, titles, formulas, kind, colour) {
  const cell = (section, of) => {
    if (!of) return DASH;
    return kind === "speedup" ? speedupCell(section, of.speedup)
      : two(number(of.mat, 2), `${of.num_new_tokens} / ${of.num_steps}`);
  };
  const formula = kind === "speedup" ? `${formulas.speedup}; below it: ${formulas.spread}`
    : `${formulas.mat}; below it: new tokens / steps`;
  const columns = [
    { title: "configuration", name: "text", cell: (s) => nameCell(s, colour) },
    ...report.groups.map((group) => ({ title: group, formula: `${titles[group]}: ${formula}`,
      cell: (s) => cell(s, s.groups[group]) })),
    { title: "overall", formula, name: "num overall", cell: (s) => cell(s, s.overall) },
  ];
  return dataTable(`By kind of task: ${kind}`, columns, report.configurations, (s) => s.name);
}

// genai-perf's table of one configuration.
function latencyTable(section, rows) {
  const latency = section.latency;
  const names = ["avg", "min", "max", "p99", "p90", "p75"];
  const lines = Object.entries(rows).map(([key, [title, formula]]) =>
    ({ title, formula, values: names.map((name) => latency.rows[key]?.[name]) }));
  const columns = [
    { title: "", name: "text", cell: (row) => row.title, hint: (row) => row.formula },
    ...names.map((name, i) => ({ title: name, cell: (row) => number(row.values[i], 2) })),
  ];
  return dataTable(`Latency of ${section.name}`, columns, lines, (row) => row.title);
}

function divergenceList(report) {
  const lines = report.configurations.flatMap((section) =>
    (section.verdict?.divergences ?? []).map((one) => {
      const link = (run, words) => h("a", { href: `?run=${encodeURIComponent(run)}`,
        target: "_blank", rel: "noopener" }, words);
      const why = one.near_tie === null ? "not looked into" : one.near_tie
        ? "a near-tie, which rounding alone flips" : "no rounding does this";
      return h("li", {}, `${section.name}: ${one.suite} ${one.prompt}, turn ${one.turn + 1}, repeat `
        + `${one.repeat + 1} differs from token ${one.at + 1} on (${why}): `,
      link(one.run_id, "its run"), " \u00b7 ", link(one.reference_run_id, "plain decoding\u2019s"),
      ...one.gap.map((words) => h("span", { class: "gap" }, words)));
    }));
  if (!lines.length) return null;
  return h("details", { class: "card" }, h("summary", {}, `${plural(lines.length, "answer")} `
    + "that differ from plain decoding\u2019s"), h("ul", { class: "lines" }, ...lines));
}

"use strict";
// Draws the record of a run, or of several that are compared: `run_record.py` says what is in it. Everything in it is text of
// others: it is never parsed as HTML.

const LIVE_MS = 2000;
const SAMPLE_ROWS = 200;
const COLORS = { blue: "#2f7ed8", orange: "#d9730d", green: "#2a9d5c", red: "#d1345b", violet: "#8457c9", grey: "#8a93a3" };
const KIND_COLORS = {
  "trains": COLORS.blue, "waits for samples": COLORS.grey, "syncs": COLORS.orange, "blocked by the commit": COLORS.red,
  "serves even versions": COLORS.green, "serves odd versions": COLORS.violet,
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = new Map();  // by the caption
let span = { width: 20, end: null };  // of the time line, in versions; without an end, the newest ones
let search = { text: "", least: "", most: "" };  // of samples
let record = JSON.parse(document.getElementById("record").textContent);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function figure(value, unit) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (unit === "share") return `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
  const size = Math.abs(value);
  const text = Number.isInteger(value) ? String(value) : size >= 100 ? value.toFixed(0) : size >= 1 ? value.toFixed(2) : value.toPrecision(3);
  return unit ? `${text} ${unit}` : text;
}

const milliseconds = (seconds) => (typeof seconds === "number" ? 1e3 * seconds : null);
const clock = (time) => (typeof time === "number" ? new Date(1e3 * time).toISOString().slice(0, 19).replace("T", " ") : "");
const megabytes = (bytes) => (typeof bytes === "number" ? bytes / 1e6 : null);
const ago = (time) => (typeof time === "number" ? record.read - time : null);

// -- charts ----------------------------------------------------------------------------------------------------------

function barOptions(xTitle) {
  return { ...options(xTitle, "", { y: { type: "category" } }), indexAxis: "y", parsing: true, normalized: false };
}

function options(xTitle, yTitle, more = {}) {
  const style = getComputedStyle(document.documentElement);
  const [ink, rule] = [style.getPropertyValue("color") || "#888", dark.matches ? "#37404e" : "#d5dae2"];
  const axis = (title) => ({ title: { display: Boolean(title), text: title, color: ink }, ticks: { color: ink }, grid: { color: rule } });
  return {
    animation: false, responsive: true, maintainAspectRatio: false, parsing: false, normalized: true,
    interaction: { mode: "nearest", axis: "x", intersect: false },
    plugins: { legend: { position: "bottom", labels: { color: ink, boxWidth: 14, boxHeight: 4 } } },
    scales: { x: { type: "linear", ...axis(xTitle) }, y: { ...axis(yTitle), ...more.y } },
  };
}

function draw(grid, caption, summary, wide, config) {
  const canvas = element("canvas", { role: "img", "aria-label": `${caption}. ${summary}` });
  const holder = element("figure", wide ? { class: "wide" } : {}, element("figcaption", {}, caption), element("div", { class: "canvas" }, canvas));
  grid.append(holder);
  charts.set(caption, new Chart(canvas, config));
  return holder;
}

function curve(grid, caption, xTitle, yTitle, curves, more) {
  const shown = curves
    .map(([label, color, rows, x, y, style]) => ({
      label, borderColor: color, backgroundColor: color, borderWidth: 1.5, pointRadius: rows.length > 60 ? 0 : 2, ...style,
      data: rows.filter((row) => typeof y(row) === "number").map((row) => ({ x: x(row), y: y(row) })),
    }))
    .filter((each) => each.data.length);
  if (!shown.length) return;
  const last = shown.map((each) => `${each.label}: ${figure(each.data[each.data.length - 1].y)}`).join(", ");
  draw(grid, caption, `Last values: ${last}.`, false, { type: "line", data: { datasets: shown }, options: options(xTitle, yTitle, more) });
}

function curves(grid) {
  const { steps, evaluations, syncs } = record;
  const [step, version] = [(row) => row.step, (row) => row.version];
  const [at, lag, sync] = ["optimizer step", "versions", "milliseconds"];
  curve(grid, "Reward", at, "", [
    ["reward of the batch", COLORS.blue, steps, step, (row) => row.reward],
    ["held-out accuracy", COLORS.orange, evaluations, step, (row) => row.accuracy, { pointRadius: 4, borderDash: [5, 4] }],
  ]);
  const measures = [...new Set(evaluations.flatMap((row) => Object.keys(row)))].filter((key) => /^accuracy_|^pass_at_/.test(key));
  const colors = Object.values(COLORS);
  curve(grid, "Held-out sets and pass@k", at, "", measures.map((key, index) => [
    key.replace("pass_at_", "pass@").replace("_", " "), colors[index % colors.length], evaluations, step, (row) => row[key], { pointRadius: 4 },
  ]), { y: { min: 0 } });
  curve(grid, "Loss and held-out log-probability", at, "nats", [
    ["loss", COLORS.blue, steps.some((row) => "reward" in row) ? [] : steps, step, (row) => row.loss],
    ["mean log-probability of held-out targets", COLORS.orange, evaluations, step, (row) => row.mean_logprob, { pointRadius: 4 }],
  ]);
  curve(grid, "Staleness", at, lag, [
    ["mean", COLORS.blue, steps, step, (row) => row.staleness_mean],
    ["max", COLORS.red, steps, step, (row) => row.staleness_max],
  ], { y: { min: 0 } });
  curve(grid, "Trainer and rollout apart", at, "nats a token", [
    ["mean difference of log-probabilities", COLORS.blue, steps, step, (row) => row.rollout_gap],
    ["KL divergence, estimated", COLORS.orange, steps, step, (row) => row.approx_kl],
    ["share that the loss leaves out", COLORS.red, steps, step, (row) => row.mismatch_masked],
  ], { y: { min: 0 } });
  curve(grid, "Throughput", at, "tokens a second", [["tokens a second since the start", COLORS.green, steps, step, (row) => row.tokens_per_s]], { y: { min: 0 } });
  const committed = syncs.filter((row) => row.outcome === "committed");
  curve(grid, "Times of syncs", "version", sync, [
    ["latency", COLORS.orange, committed, version, (row) => milliseconds(row.latency_s)],
    ["rollouts blocked", COLORS.red, committed, version, (row) => milliseconds(row.rollout_blocked_s)],
    ["trainer blocked", COLORS.blue, steps, step, (row) => milliseconds(row.trainer_blocked_s)],
  ], { y: { type: "logarithmic" } });
  curve(grid, "Time of a step", at, "seconds", [
    ["trains", COLORS.blue, steps, step, (row) => row.seconds],
    ["waits for samples", COLORS.grey, steps, step, (row) => row.waited_for_rollouts_s],
  ], { y: { min: 0 } });
  stalls(grid);
}

function stalls(grid) {
  if (!record.stalls) return;
  const names = { trainer: "trainer, asynchronous", rollouts: "rollouts, asynchronous", blocking: "either side, if both waited" };
  const rows = Object.entries(record.stalls).map(([key, seconds]) => ({ y: names[key], x: milliseconds(seconds) }));
  const config = barOptions("milliseconds a step");
  config.plugins.legend.display = false;
  const colors = rows.map((row) => (row.y === names.blocking ? COLORS.grey : COLORS.blue));
  const summary = rows.map((row) => `${row.y}: ${figure(row.x, "ms")}`).join(", ");
  draw(grid, "Stalls by syncs", summary, false, { type: "bar", data: { labels: rows.map((row) => row.y), datasets: [{ data: rows, backgroundColor: colors, minBarLength: 2 }] }, options: config });
}

function timeLine(grid) {
  const spans = record.time_line;
  if (!spans.length) return;
  const versions = spans.map((each) => each.version);
  const [first, last] = [Math.min(...versions), Math.max(...versions)];
  const lanes = ["generation", "sync", "trainer"].filter((lane) => spans.some((each) => each.lane === lane));
  const config = barOptions("seconds");
  config.interaction = { mode: "nearest", axis: "xy", intersect: true };
  config.plugins.tooltip = { callbacks: { label: ({ dataset, raw }) => `${dataset.label}, ${raw.version}: ${figure(raw.x[1] - raw.x[0], "s")}` } };
  const holder = draw(grid, "Time line", `Trainer, sync and generation of versions ${first} to ${last}.`, true, { type: "bar", data: { labels: lanes, datasets: [] }, options: config });

  const end = element("input", { type: "range", min: first, max: last, value: span.end ?? last, "aria-label": "Last version shown" });
  const width = element("input", { type: "range", min: 2, max: Math.max(2, last - first + 1), value: Math.min(span.width, last - first + 1), "aria-label": "Number of versions shown" });
  const said = element("output");
  function show() {
    span = { width: Number(width.value), end: Number(end.value) === last ? null : Number(end.value) };
    const [to, from] = [Number(end.value), Math.max(first, Number(end.value) - span.width + 1)];
    const inside = spans.filter((each) => each.version >= from && each.version <= to);
    const zero = Math.min(...inside.map((each) => each.start));
    const chart = charts.get("Time line");
    chart.data.datasets = Object.entries(KIND_COLORS)
      .map(([kind, color]) => ({
        label: kind, backgroundColor: color, grouped: false, minBarLength: 1, borderSkipped: false,
        data: inside.filter((each) => each.kind === kind).map((each) => ({ x: [each.start - zero, each.end - zero], y: each.lane, version: each.version })),
      }))
      .filter((each) => each.data.length);
    chart.update();
    said.textContent = `versions ${from} to ${to}, from ${clock(zero)} UTC`;
  }
  end.addEventListener("input", show);
  width.addEventListener("input", show);
  holder.append(element("label", {}, "up to version", end), element("label", {}, "versions shown", width), said);
  show();
}

// -- tables ----------------------------------------------------------------------------------------------------------

function table(parent, title, rows, columns, heading = title) {
  if (!rows || !rows.length) return;
  const isNumber = (value) => typeof value === "number";
  const cells = rows.map((row) => columns.map(([, value]) => value(row)));
  const numeric = columns.map((_, index) => cells.some((row) => isNumber(row[index])));
  const head = element("tr", {}, ...columns.map(([name], index) => element("th", { scope: "col", ...(numeric[index] ? { class: "number" } : {}) }, name)));
  const body = cells.map((row) => element("tr", {}, ...row.map((value, index) => {
    const text = figure(value);
    return element("td", numeric[index] ? { class: "number" } : text.length > 40 ? { class: "long" } : {}, text);
  })));
  const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  parent.append(...(heading ? [element("h2", {}, heading)] : []), scroll);
}

function tables(parent) {
  const service = record.service || {};
  table(parent, "Models", service.models, [
    ["model", (row) => row.id], ["client", (row) => row.client], ["state", (row) => row.state], ["rank", (row) => row.rank],
    ["optimizer steps", (row) => row.steps], ["waiting requests", (row) => row.queued], ["checkpoints", (row) => row.checkpoints],
    ["used", (row) => clock(row.used)],
  ]);
  table(parent, "Queues", service.queues, [
    ["request", (row) => row.kind], ["waiting", (row) => row.queued], ["oldest waits, s", (row) => ago(row.oldest_queued)],
    ["answered", (row) => row.done], ["failed", (row) => row.failed], ["mean time, s", (row) => row.mean_s],
  ]);
  table(parent, "Samplers", service.samplers, [
    ["sampler", (row) => row.id], ["client", (row) => row.client], ["weights", (row) => row.weights],
    ["moves on with commits", (row) => (row.inflight ? "yes" : "no")], ["clients", (row) => row.clients], ["made", (row) => clock(row.created)],
  ]);
  const syncs = [
    ["version", (row) => row.version], ["time, UTC", (row) => clock(row.time)], ["outcome", (row) => row.outcome],
    ["latency, ms", (row) => milliseconds(row.latency_s)], ["export, ms", (row) => milliseconds(row.export_s)],
    ["transfer, ms", (row) => milliseconds(row.transfer_s)], ["install, ms", (row) => milliseconds(row.install_s)],
    ["rollouts blocked, ms", (row) => milliseconds(row.rollout_blocked_s)], ["tokens prefilled again", (row) => row.recomputed_tokens],
    ["sent, MB", (row) => megabytes(row.sent_bytes)], ["replicas", (row) => row.replicas], ["retries", (row) => row.retries], ["error", (row) => row.error],
  ];
  table(parent, "Aborted syncs", record.aborted, syncs);
  table(parent, "Replicas", record.events, [
    ["time, UTC", (row) => clock(row.time)], ["replica", (row) => row.replica], ["event", (row) => row.event], ["detail", (row) => row.detail],
  ]);
  table(parent, "Drawn and trained samples", record.drawn, [["about", (row) => row.subject], ["over the run", (row) => row.sentence]]);
  table(parent, "Failed samples and steps", record.failures, [
    ["time, UTC", (row) => clock(row.time)], ["kind", (row) => row.kind], ["count", (row) => row.count], ["error", (row) => row.error],
  ]);
  samples(parent);
  table(parent, "Newest syncs", [...record.syncs].reverse(), syncs);
}

function samples(parent) {
  if (!record.samples.length) return;
  const found = element("div");
  const said = element("output");
  function field(key, label, attributes) {
    const input = element("input", { ...attributes, "aria-label": label });
    input.value = search[key];
    input.addEventListener("input", () => { search[key] = input.value; look(); });
    return element("label", {}, label, input);
  }
  function look() {
    const words = search.text.toLowerCase().split(/\s+/).filter(Boolean);
    const [least, most] = [search.least, search.most].map((text) => (text === "" ? null : Number(text)));
    const rows = record.samples.filter((row) => {
      const text = `${row.prompt} ${row.completion}`.toLowerCase();
      return words.every((word) => text.includes(word)) && (least === null || row.reward >= least) && (most === null || row.reward <= most);
    }).reverse();
    found.replaceChildren();
    table(found, "Samples found", rows.slice(0, SAMPLE_ROWS), [
      ["step", (row) => row.step], ["reward", (row) => row.reward], ["prompt", (row) => row.prompt], ["completion", (row) => row.completion],
      ["versions (tokens)", (row) => (row.versions || []).map((each) => (Array.isArray(each) ? `${each[0]} (${each[1]})` : each)).join(", ")],
    ], "");
    said.textContent = `${rows.length} of ${record.samples.length} samples` + (rows.length > SAMPLE_ROWS ? `, the newest ${SAMPLE_ROWS} of them shown` : ", newest first");
  }
  parent.append(element("h2", {}, "Samples"), element("div", { class: "search", role: "search" },
    field("text", "words in prompt or completion", { type: "search" }),
    field("least", "reward at least", { type: "number", step: "any" }),
    field("most", "reward at most", { type: "number", step: "any" }), said), found);
  look();
}

// -- several runs ------------------------------------------------------------------------------------------------------

function comparison(grid, parent) {
  const colors = Object.values(COLORS);
  const minutes = (run) => (row) => (row.time - run.began) / 60;
  const measures = [
    ["Reward", "", "steps", (row) => row.reward], ["Held-out accuracy", "", "evaluations", (row) => row.accuracy],
    ["Loss", "", "steps", (row) => row.loss], ["Held-out log-probability", "nats", "evaluations", (row) => row.mean_logprob],
    ["Mean staleness", "versions", "steps", (row) => row.staleness_mean], ["Throughput", "tokens a second", "steps", (row) => row.tokens_per_s],
    ["Time of a step", "seconds", "steps", (row) => row.seconds],
  ];
  for (const [caption, unit, rows, value] of measures) {
    const lines = (x) => record.runs.map((run, index) => [run.name, colors[index % colors.length], run[rows], x(run), value]);
    curve(grid, caption, "optimizer step", unit, lines(() => (row) => row.step));
    if (rows === "evaluations" || caption === "Reward") curve(grid, `${caption} over time`, "minutes since its start", unit, lines(minutes));
  }
  const names = [...new Set(record.runs.flatMap((run) => run.figures.map((each) => each.name)))];
  const of = (run, name) => run.figures.find((each) => each.name === name);
  table(parent, "Figures", names, [
    ["", (name) => name],
    ...record.runs.map((run) => [run.name, (name) => figure(of(run, name)?.value, of(run, name)?.unit)]),
  ]);
  table(parent, "Settings that differ", record.differences, [
    ["", (row) => row.name], ...record.runs.map((run, index) => [run.name, (row) => row.values[index]]),
  ]);
}

// -- the page --------------------------------------------------------------------------------------------------------

function status() {
  const of = record.runs ? record.runs.map((run) => `${run.name} ${run.status}`).join(", ") : record.status;
  return `${of}; read ${clock(record.read)} UTC`;
}

function show() {
  const focused = document.activeElement?.getAttribute("aria-label");
  const scrolled = new Map([...document.querySelectorAll(".scroll")].map((each) => [each.getAttribute("aria-label"), [each.scrollLeft, each.scrollTop]]));
  for (const chart of charts.values()) chart.destroy();
  charts.clear();
  document.title = `${record.name}: weightlane report`;
  document.getElementById("name").textContent = record.name;
  document.getElementById("status").textContent = status();
  document.getElementById("figures").replaceChildren(
    ...(record.figures || []).map((each) => element("div", {}, element("dt", {}, each.name), element("dd", {}, figure(each.value, each.unit)))));
  const grid = element("div", { class: "charts" });
  const sections = document.getElementById("sections");
  sections.replaceChildren(element("h2", {}, "Curves"), grid);
  if (record.runs) comparison(grid, sections);
  else {
    curves(grid);
    timeLine(grid);
    tables(sections);
  }
  if (!grid.children.length) document.querySelectorAll("main > h2:first-child, main > .charts").forEach((each) => each.remove());
  for (const each of document.querySelectorAll(".scroll")) [each.scrollLeft, each.scrollTop] = scrolled.get(each.getAttribute("aria-label")) ?? [0, 0];
  if (focused) [...document.querySelectorAll("[aria-label]")].find((each) => each.getAttribute("aria-label") === focused)?.focus({ preventScroll: true });
}

async function followRun() {
  const asked = performance.now();
  try {
    const answer = await fetch("record.json", { signal: AbortSignal.timeout(10 * LIVE_MS) });
    if (!answer.ok) throw new Error(await answer.text());
    const newer = await answer.json();
    const changed = JSON.stringify({ ...newer, read: 0 }) !== JSON.stringify({ ...record, read: 0 });
    record = newer;
    if (changed) show();
    else document.getElementById("status").textContent = status();
  } catch (error) {
    document.getElementById("status").textContent = `no answer from weightlane report: ${error.message}; last read ${clock(record.read)} UTC`;
  }
  setTimeout(followRun, Math.max(LIVE_MS, 5 * (performance.now() - asked)));  // a long record takes its reader time
}

show();
dark.addEventListener("change", show);
if (record.live) setTimeout(followRun, LIVE_MS);

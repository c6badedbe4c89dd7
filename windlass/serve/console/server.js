// What the server is and has: levers with what each gave, memory, adapters, and its choices.

import { getJson } from "./api.js";
import { h } from "./dom.js";
import { bytes, count, dollars, percent, plural, seconds } from "./format.js";
import { repeatWhileShown } from "./repeat.js";
import { store, subscribe } from "./store.js";

const MEMORY_MS = 5000; // a report takes some milliseconds of the engine's time

export function makeServer() {
  const overview = h("div", { class: "tiles" });
  const levers = h("div", { class: "levers" });
  const memory = h("div", {});
  const adapters = h("div", {});
  const choices = h("div", {});
  const element = h(
    "div",
    { class: "page" },
    h("header", { class: "page-head" }, h("h1", {}, "Server")),
    overview,
    section("Levers", "What each optimisation gave since the engine started.", levers),
    section("Memory", "By owner, and the KV blocks by use.", memory),
    section("Adapters", null, adapters),
    section("Choices", "What was chosen at start-up, and why.", choices),
  );
  let infoShown = null;
  let reports = []; // of the memory of each replica
  const render = ({ info, state }) => {
    if (!info || !state || !element.isConnected) return;
    overview.replaceChildren(...tiles(info, state));
    levers.replaceChildren(...leversOf(info, state).map(leverCard));
    adapters.replaceChildren(adapterList(state, reports));
    if (infoShown !== info) choices.replaceChildren(choiceTable(info));
    infoShown = info;
  };
  subscribe(render);
  const failed = (message) => memory.replaceChildren(h("p", { class: "muted" }, message));
  const refresh = async () => {
    const report = await getJson("memory");
    reports = report.replicas ?? [report];
    memory.replaceChildren(...reports.map((each, at) => memoryReport(each, reports.length > 1 ? `Replica ${at}` : null)));
    render(store);
  };
  const show = () => {
    render(store);
    repeatWhileShown(element, MEMORY_MS, refresh, failed);
  };
  return { element, show };
}

function section(title, hint, ...content) {
  return h("section", { class: "card" }, h("header", {}, h("h2", {}, title), hint && h("p", { class: "muted" }, hint)), content);
}

function tiles(info, state) {
  const up = state.engines.filter(({ health }) => health.status === "ok").length;
  const facts = [
    ["Model", info.model, info.architecture],
    ["Engines", `${up} of ${state.engines.length} up`, `version ${info.version}`],
    ["Up for", seconds(Math.max(0, state.time - info.started)), plural(state.num_in_flight, "request") + " in flight"],
    ["Context", `${count(info.limits.max_model_len)} tokens`, `KV cache: ${count(info.limits.kv_cache_tokens)} tokens`],
    ["Batch", plural(info.limits.max_num_seqs, "sequence"), `${count(info.limits.max_num_batched_tokens)} tokens per step`],
  ];
  if (state.cost?.usd) facts.push(["Spent", dollars(state.cost.usd.total), `${dollars(state.cost.price_per_hour)} per hour, ${dollars(state.cost.saved_usd)} saved`]);
  return facts.map(([name, value, detail]) => h("div", { class: "card tile" }, h("h2", {}, name), h("strong", { title: value }, value), h("small", {}, detail)));
}

// ---- levers ----------------------------------------------------------------------------------

const sum = (state, get) => state.engines.reduce((total, { stats }) => total + get(stats), 0);
const choice = (info, what) => info.choices.find((each) => each.what === what);

function leversOf(info, state) {
  const levers = [prefixCache(info, state), batching(state), speculation(info, state), executors(state)];
  for (const what of ["weights", "KV format", "tensor parallelism", "pipeline", "replicas"]) {
    const found = choice(info, what);
    if (found) levers.push({ name: capital(what), gain: found.value, detail: found.reason });
  }
  return levers.filter(Boolean);
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function prefixCache(info, state) {
  const hits = sum(state, (stats) => stats.prefix_hits);
  const queries = sum(state, (stats) => stats.prefix_queries);
  const saved = sum(state, (stats) => stats.account.saved_s);
  const money = state.cost?.saved_usd ? `, ${dollars(state.cost.saved_usd)}` : "";
  return {
    name: "Prefix cache",
    isOff: !info.prefix_caching,
    gain: info.prefix_caching ? percent(queries ? hits / queries : null) : "off",
    share: queries ? hits / queries : 0,
    detail: info.prefix_caching ? `${count(hits)} of ${plural(queries, "prompt token")} were cached: about ${seconds(saved)} of engine time saved${money}` : "--enable-prefix-caching switches it on",
  };
}

function batching(state) {
  const tokens = sum(state, (stats) => stats.num_generated_tokens);
  const steps = sum(state, (stats) => stats.num_steps);
  const preemptions = sum(state, (stats) => stats.num_preemptions);
  return {
    name: "Continuous batching",
    gain: steps ? `${(tokens / steps).toFixed(2)} ×` : "–",
    detail: `${plural(tokens, "token")} in ${plural(steps, "step")}; ${plural(preemptions, "preemption")}`,
  };
}

function speculation(info, state) {
  const drafted = sum(state, (stats) => stats.num_draft_tokens);
  const found = choice(info, "speculation");
  if (!drafted) return found && { name: "Speculation", isOff: found.value === "none", gain: found.value === "none" ? "off" : "no drafts yet", detail: `${found.value}: ${found.reason}` };
  const accepted = sum(state, (stats) => stats.num_accepted_tokens);
  const saved = sum(state, (stats) => stats.num_saved_tokens);
  const generated = sum(state, (stats) => stats.num_generated_tokens);
  const drafting = sum(state, (stats) => stats.drafting_s);
  return {
    name: "Speculation",
    gain: percent(accepted / drafted),
    share: accepted / drafted,
    detail: `${count(accepted)} of ${plural(drafted, "draft token")} accepted; ${count(saved)} of ${plural(generated, "token")} needed no step of their own; ${seconds(drafting)} spent drafting`,
  };
}

// The share of steps that the fastest executor computed, and why it refused the others.
function executors(state) {
  const steps = {};
  const refusals = {};
  for (const { stats } of state.engines) {
    for (const [name, number] of Object.entries(stats.executors)) steps[name] = (steps[name] ?? 0) + number;
    for (const reasons of Object.values(stats.refusals)) {
      for (const [reason, number] of Object.entries(reasons)) refusals[reason] = (refusals[reason] ?? 0) + number;
    }
  }
  const all = Object.values(steps).reduce((total, number) => total + number, 0);
  if (!all) return null;
  const recorded = (all - (steps.eager ?? 0)) / all;
  const named = Object.entries(steps).map(([name, number]) => `${name}: ${plural(number, "step")}`).join(", ");
  const [worst] = Object.entries(refusals).sort((a, b) => b[1] - a[1]);
  return { name: "Recorded steps and graphs", gain: percent(recorded), share: recorded, detail: worst ? `${named}. Most common refusal: ${worst[0]}` : named };
}

function leverCard({ name, gain, detail, share, isOff }) {
  const bar = h("i", {});
  bar.style.width = `${100 * (share ?? 0)}%`;
  return h("article", { class: `lever${isOff ? " off" : ""}` }, h("h3", {}, name), h("strong", {}, gain), share !== undefined && h("div", { class: "meter" }, bar), h("p", {}, detail));
}

// ---- memory ----------------------------------------------------------------------------------

function memoryReport(report, title) {
  if (!report.blocks) return h("p", { class: "muted" }, `The engine is ${report.state}; it holds no memory.`);
  const { used, cached, free, unfilled, block_size: size } = report.blocks;
  const blocks = [
    { name: "In use", size: used.blocks, color: 1, text: `${plural(used.blocks, "block")}, ${bytes(used.bytes)}; ${count(unfilled.tokens)} positions unfilled` },
    { name: "Cached", size: cached.blocks, color: 5, text: `${plural(cached.blocks, "block")}, ${bytes(cached.bytes)}; free, and reusable by the next prompt` },
    { name: "Free", size: free.blocks, color: 0, text: `${plural(free.blocks, "block")}, ${bytes(free.bytes)}` },
  ];
  return h("div", { class: "memory" }, title && h("h3", {}, title), report.parts && ledger(ownersOf(report), report), h("h3", {}, `KV blocks of ${size} tokens`), stack(blocks), table(blocks));
}

function ownersOf(report) {
  const parts = Object.entries(report.parts).map(([name, part], at) => ({
    name: capital(name),
    size: part.resident ?? part.num_bytes,
    color: 1 + (at % 5),
    text: part.resident === null || part.resident === part.num_bytes ? bytes(part.num_bytes) : `${bytes(part.resident)} resident of ${bytes(part.num_bytes)}`,
  }));
  const rest = [
    { name: "Mapped files", size: report.file_bytes, color: 0, text: bytes(report.file_bytes) },
    { name: "Unaccounted", size: report.unaccounted_bytes, color: 0, text: `${bytes(report.unaccounted_bytes)}: interpreter, allocator reserve` },
  ];
  return [...parts, ...rest].filter((each) => each.size > 0);
}

function ledger(owners, report) {
  const device = report.device_total_bytes ? `, of ${bytes(report.device_total_bytes)}` : "";
  return h("div", { class: "memory" }, h("h3", {}, `${bytes(report.total_bytes)} on ${report.device}${device}`), stack(owners), table(owners));
}

function stack(parts) {
  const all = parts.reduce((total, part) => total + part.size, 0) || 1;
  const said = parts.map((part) => `${part.name} ${percent(part.size / all)}`).join(", ");
  const bar = h("div", { class: "stack", role: "img", "aria-label": said });
  for (const part of parts.filter(({ size }) => size > 0)) {
    const piece = h("i", { class: `c${part.color}`, title: `${part.name}: ${part.text}` });
    piece.style.width = `${(100 * part.size) / all}%`;
    bar.append(piece);
  }
  return bar;
}

function table(parts) {
  return h("dl", { class: "facts keys" }, parts.map((part) => h("div", {}, h("dt", { class: `c${part.color}` }, part.name), h("dd", {}, part.text))));
}

// ---- adapters and choices --------------------------------------------------------------------

const PLACES = [
  ["device", "device", "running"],
  ["memory", "memory", ""],
  ["disk", "disk", ""],
];

function adapterList(state, reports) {
  const names = Object.entries(state.adapters);
  if (!names.length) return h("p", { class: "muted" }, "No adapters. Load them with --lora-modules NAME=FOLDER, or through the API with an admin key.");
  const stats = state.engines.map((engine) => engine.stats.adapters).find(Boolean);
  const where = stats && h("p", { class: "muted" }, `${stats.num_resident} on the device, ${stats.num_in_memory} in host memory; read from disk ${plural(stats.num_reads, "time")}; ${plural(stats.num_waiting, "request")} waiting for one.`);
  const columns = ["Adapter", "Where", "Rank", "Size", "Running", "Queued", "Requests"];
  const classes = { Rank: "roomy", Size: "roomy", Running: "wide", Queued: "wide" };
  const head = columns.map((name) => h("th", { scope: "col", class: classes[name] }, name));
  const rows = names
    .map(([name, folder]) => ({ name, folder, ...adapterFigures(name, reports) }))
    .sort((a, b) => b.running - a.running || b.requests - a.requests || a.name.localeCompare(b.name))
    .map(adapterRow);
  return h("div", { class: "requests" }, where, h("table", { class: "list plain" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}

// The figures of an adapter over all replicas; its size and the fastest place that has it.
function adapterFigures(name, reports) {
  const found = reports.flatMap((report) => report.adapters ?? []).filter((each) => each.name === name);
  const total = (field) => (found.length ? found.reduce((all, each) => all + each[field], 0) : null);
  const place = PLACES.find(([each]) => found.some((use) => use.place === each));
  const read = found.find((each) => each.rank !== null);
  return { place, rank: read?.rank, bytes: read?.bytes, running: total("running"), waiting: total("waiting"), requests: total("requests") };
}

function adapterRow({ name, folder, place, rank, bytes: size, running, waiting, requests }) {
  return h(
    "tr",
    {},
    h("td", {}, h("b", {}, name), h("small", { class: "block plain", title: folder }, folder)),
    h("td", {}, place ? h("span", { class: `badge ${place[2]}` }, place[1]) : "–"),
    h("td", { class: "roomy" }, count(rank)),
    h("td", { class: "roomy" }, bytes(size)),
    h("td", { class: "wide" }, count(running)),
    h("td", { class: "wide" }, count(waiting)),
    h("td", {}, count(requests)),
  );
}

function choiceTable(info) {
  const rows = info.choices.map(({ what, value, reason }) => h("div", {}, h("dt", {}, what), h("dd", {}, value, h("small", { class: "block" }, reason))));
  const phases = Object.entries(info.startup_seconds).filter(([, time]) => time >= 0.005).map(([name, time]) => `${name} ${seconds(time)}`).join(", ");
  return h("div", {}, h("dl", { class: "facts" }, rows), phases && h("p", { class: "muted start" }, `Start-up: ${phases}.`));
}

// Polls the server, keeps the latest figures with their history, and notifies the views.

import { ApiError, getJson } from "./api.js";
import { forgetSamples, savedSamples, saveSamples } from "./history.js";
import { pause } from "./repeat.js";

const INTERVAL_MS = 1500;
const MAX_SAMPLES = 1300; // about half an hour
const WINDOW_S = 30; // of percentiles and rates that need several requests
const GAP_S = 10; // no rate is computed over a longer pause

export const store = {
  info: null, // /console/info
  state: null, // /console/state
  samples: [], // what the charts show
  connected: null, // null: not known yet
  problem: "", // why the server does not answer, or answers with an error
};

// Forgets what was shown with a key.
export function forget() {
  store.info = null;
  store.samples = [];
  forgetSamples();
}

const listeners = new Set();

export function subscribe(listener) {
  listeners.add(listener);
  listener(store);
}

const notify = () => listeners.forEach((listener) => listener(store));

// Polls for ever. A hidden page asks nothing; the charts then have a gap.
export async function poll() {
  addEventListener("pagehide", () => store.info && saveSamples(store.info, store.samples));
  for (;;) {
    if (!document.hidden) await pollOnce();
    await pause(INTERVAL_MS);
  }
}

async function pollOnce() {
  try {
    const state = await getJson("console/state");
    if (!store.info || isNewEngine(store.state, state)) {
      const isFirst = !store.info;
      store.info = await getJson("console/info");
      if (isFirst) store.samples = savedSamples(store.info);
    }
    addSample(state);
    Object.assign(store, { state, connected: true, problem: "" });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    Object.assign(store, { connected: false, problem: error.message });
  }
  notify();
}

const isNewEngine = (last, now) =>
  last !== null && now.engines.some((engine, at) => engine.stats.num_steps < (last.engines[at]?.stats.num_steps ?? 0));

// ---- samples ---------------------------------------------------------------------------------

const COUNTERS = [
  "num_generated_tokens",
  "num_prompt_tokens_computed",
  "prefix_hits",
  "prefix_queries",
  "num_accepted_tokens",
  "num_draft_tokens",
];

const total = (state, field) => state.engines.reduce((sum, { stats }) => sum + stats[field], 0);

// What later samples are compared with.
const countersOf = (state) => ({
  ...Object.fromEntries(COUNTERS.map((field) => [field, total(state, field)])),
  latencies: state.latencies,
});

function addSample(state) {
  const { samples } = store;
  const last = samples.at(-1);
  const earlier = samples.find((each) => each.time >= state.time - WINDOW_S);
  const isGap = !last || state.time - last.time > GAP_S;
  samples.push({ time: state.time, counters: countersOf(state), ...figures(state, isGap ? null : last, earlier) });
  if (samples.length > MAX_SAMPLES) samples.shift();
  for (const each of samples) {
    if (each.time >= state.time - 2 * WINDOW_S) break;
    delete each.counters;
  }
}

// `last`, `earlier`: samples with their counters, or nothing.
function figures(state, last, earlier) {
  const rate = (field) => (last ? Math.max(0, total(state, field) - last.counters[field]) / (state.time - last.time) : null);
  const share = (part, whole) => {
    const added = earlier ? total(state, whole) - earlier.counters[whole] : 0;
    return added > 0 ? (total(state, part) - earlier.counters[part]) / added : null;
  };
  const quantile = (name, q) => (earlier ? quantileOf(earlier.counters.latencies[name], state.latencies[name], q) : null);
  const blocks = Math.max(1, total(state, "num_blocks"));
  return {
    generated: rate("num_generated_tokens"),
    prompt: rate("num_prompt_tokens_computed"),
    ttft50: quantile("ttft", 0.5),
    ttft95: quantile("ttft", 0.95),
    tpot50: quantile("tpot", 0.5),
    tpot95: quantile("tpot", 0.95),
    queue50: quantile("queue", 0.5),
    queue95: quantile("queue", 0.95),
    running: total(state, "num_running"),
    waiting: state.num_waiting,
    used: total(state, "num_used_blocks") / blocks,
    cached: total(state, "num_cached_blocks") / blocks,
    hitRate: share("prefix_hits", "prefix_queries"),
    acceptance: share("num_accepted_tokens", "num_draft_tokens"),
    cost: state.cost?.usd_per_million_tokens_last_minute?.all ?? null,
  };
}

// A quantile of what was observed between two cumulative histograms, interpolated in its bucket.
export function quantileOf(before, after, q) {
  const counts = after.counts.map((value, at) => value - before.counts[at]);
  const all = counts.at(-1);
  if (all <= 0) return null;
  const at = counts.findIndex((value) => value >= q * all);
  const low = at ? after.le[at - 1] : 0;
  const high = after.le[at] ?? low; // above the last bound: at least that
  const below = at ? counts[at - 1] : 0;
  return low + ((high - low) * (q * all - below)) / Math.max(1, counts[at] - below);
}

// Live charts of the server.

import { Chart } from "./chart.js";
import { h } from "./dom.js";
import { compact, dollars, percent, seconds } from "./format.js";
import { subscribe } from "./store.js";

const WINDOWS = [
  [60, "1 min"],
  [300, "5 min"],
  [1800, "30 min"],
];

const perSecond = (value) => (value === null ? "–" : compact(value));

function makeCharts() {
  return [
    {
      title: "Throughput",
      hint: "Tokens per second",
      format: perSecond,
      headline: (now) => `${perSecond(now.generated)} tok/s`,
      series: [
        { key: "generated", label: "Generated", color: 1, area: true },
        { key: "prompt", label: "Prompt, computed", color: 2 },
      ],
    },
    {
      title: "Requests",
      hint: "Running, and waiting in the queue",
      format: compact,
      headline: (now) => `${now.running} running, ${now.waiting} queued`,
      series: [
        { key: "running", label: "Running", color: 1, area: true },
        { key: "waiting", label: "Queued", color: 4 },
      ],
    },
    {
      title: "Time to first token",
      hint: "Requests of the last 30 s",
      format: seconds,
      series: [
        { key: "ttft50", label: "p50", color: 1 },
        { key: "ttft95", label: "p95", color: 3 },
      ],
      idle: "No request in the last 30 s",
    },
    {
      title: "Time per output token",
      hint: "Requests of the last 30 s",
      format: seconds,
      series: [
        { key: "tpot50", label: "p50", color: 1 },
        { key: "tpot95", label: "p95", color: 3 },
      ],
      idle: "No request in the last 30 s",
    },
    {
      title: "Time in the queue",
      hint: "Requests of the last 30 s",
      format: seconds,
      series: [
        { key: "queue50", label: "p50", color: 1 },
        { key: "queue95", label: "p95", color: 3 },
      ],
      idle: "No request in the last 30 s",
    },
    {
      title: "KV cache",
      hint: "Share of all blocks",
      format: percent,
      max: 1,
      series: [
        { key: "used", label: "In use", color: 1, area: true },
        { key: "cached", label: "Cached, reusable", color: 5 },
      ],
    },
    {
      title: "Prefix cache hit rate",
      hint: "Prompt tokens found in the cache, last 30 s",
      format: percent,
      max: 1,
      series: [{ key: "hitRate", label: "Hit rate", color: 5, area: true }],
      idle: "No prompt in the last 30 s",
    },
    {
      title: "Draft acceptance",
      hint: "Accepted draft tokens, last 30 s",
      format: percent,
      max: 1,
      series: [{ key: "acceptance", label: "Accepted", color: 3, area: true }],
      idle: "No draft tokens in the last 30 s",
    },
    {
      title: "Cost",
      hint: "Of the last minute, idle time included",
      format: dollars,
      headline: (now) => (now.cost === null ? "–" : `${dollars(now.cost)} / M tok`),
      series: [{ key: "cost", label: "Per million tokens", color: 2, area: true }],
      idle: "No tokens in the last minute",
      none: (store) => {
        if (store.state && !store.state.cost) return "Start the server with --price-per-hour to see costs";
        return store.state && !store.state.cost.usd_per_million_tokens_last_minute && "An admin key sees the costs of the server";
      },
    },
  ].map((options) => ({ ...options, chart: new Chart(options) }));
}

export function makeDashboard() {
  const charts = makeCharts();
  let windowS = 300;
  let latest = null;
  const update = () => {
    for (const { chart, idle, none } of charts) chart.update(latest.samples, windowS, none?.(latest) || idle);
  };
  const choices = WINDOWS.map(([length, label]) => {
    const props = { type: "radio", name: "window", checked: length === windowS };
    const onchange = () => {
      windowS = length;
      update();
    };
    return h("label", {}, h("input", { ...props, onchange }), h("span", {}, label));
  });
  const element = h(
    "div",
    { class: "page" },
    h("header", { class: "page-head" }, h("h1", {}, "Dashboard"), h("fieldset", { class: "segments", "aria-label": "Time window" }, choices)),
    h("div", { class: "charts" }, charts.map(({ chart }) => chart.element)),
  );
  subscribe((store) => {
    latest = store;
    if (element.isConnected) update();
  });
  return { element, show: update };
}

// Running and recent requests, and the trace of one of them.

import { ApiError, getJson, key } from "./api.js";
import { button, copyText, emptyState, h } from "./dom.js";
import { clockTime, count, dollars, percent, seconds } from "./format.js";
import { pause, repeatWhileShown } from "./repeat.js";
import { facts, timeline } from "./timeline.js";

const REFRESH_MS = 2000;
const PHASES = [
  ["server", 5],
  ["queued", 4],
  ["prefill", 2],
  ["decode", 1],
  ["preempted", 4],
];

export function makeRequests() {
  const body = h("div", { class: "requests" });
  const whose = key.get() ? "The last 200 requests of your key; an admin key sees all." : "The last 200 requests.";
  const note = h("p", { class: "muted" }, whose);
  const element = h("div", { class: "page" }, h("header", { class: "page-head" }, h("h1", {}, "Requests"), note), body);
  let shown = "";
  const refresh = async () => {
    const { data } = await getJson("console/requests");
    const text = JSON.stringify(data);
    if (text !== shown) render(body, data); // else a selection in the table would be lost
    shown = text;
  };
  return { element, show: () => repeatWhileShown(element, REFRESH_MS, refresh, (message) => failed(body, message)) };
}

function failed(body, message) {
  body.replaceChildren(emptyState("plug", "No requests to show", message));
}

function render(body, requests) {
  if (!requests.length) {
    body.replaceChildren(emptyState("list", "No requests yet", "Send one from the playground or with any client, and it appears here."));
    return;
  }
  const withCost = requests.some((each) => typeof each.cost === "number");
  const names = ["Request", "Started", "Time", "First token", "Prompt", "Output", "Tokens/s", withCost && "Cost", "Phases"];
  const classes = { Time: "time", Started: "wide", "First token": "wide", Prompt: "wide", "Tokens/s": "wider", Cost: "wider" };
  const head = names.filter(Boolean).map((name) => h("th", { scope: "col", class: classes[name] }, name));
  const rows = requests.map((each) => row(each, withCost));
  body.replaceChildren(legend(), h("table", { class: "list" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}

function row(request, withCost) {
  const { seconds: time, output_tokens: tokens } = request;
  const pace = time?.decode > 0 && tokens > 1 ? (tokens - 1) / time.decode : null;
  const href = `#/requests/${encodeURIComponent(request.id)}`;
  const link = h("a", { href, "aria-label": `Trace of ${request.id}` }, shortId(request.id));
  const cached = request.cached_tokens ? h("small", { class: "block plain" }, `${percent(request.cached_tokens / request.prompt_tokens)} cached`) : null;
  return h(
    "tr",
    { onclick: (event) => event.target.closest("a") ?? (location.hash = href) },
    h("td", {}, h("span", { class: `state ${request.state}`, title: request.state }), link, h("small", { class: "block" }, `${request.path} · ${request.model}`)),
    h("td", { class: "wide" }, clockTime(request.started)),
    h("td", { class: "time" }, time ? seconds(time.total) : request.elapsed === null ? "–" : seconds(request.elapsed)),
    h("td", { class: "wide" }, seconds(request.first_token)),
    h("td", { class: "wide" }, count(request.prompt_tokens), cached),
    h("td", {}, count(tokens)),
    h("td", { class: "wider" }, pace === null ? "–" : pace.toFixed(1)),
    withCost && h("td", { class: "wider" }, dollars(request.cost)),
    h("td", { class: "phases-cell" }, time ? phaseBar(time) : h("span", { class: `badge ${request.state}` }, request.state)),
  );
}

const shortId = (id) => (id.length > 22 ? `${id.slice(0, 21)}…` : id);

// How the time of a request is divided; the column Time has its length.
function phaseBar(time) {
  const parts = PHASES.filter(([name]) => time[name] > 0);
  const whole = parts.reduce((total, [name]) => total + time[name], 0);
  const said = parts.map(([name]) => `${name} ${seconds(time[name])}`).join(", ");
  const bar = h("div", { class: "phases", role: "img", "aria-label": said, title: said });
  for (const [name, color] of parts) {
    const part = h("i", { class: `c${color}` });
    part.style.width = `${(100 * time[name]) / whole}%`;
    bar.append(part);
  }
  return bar;
}

const legend = () =>
  h("ul", { class: "legend end" }, [["HTTP", 5], ["queue", 4], ["prefill", 2], ["decode", 1]].map(([name, color]) => h("li", { class: `c${color}` }, name)));

// ---- one request -----------------------------------------------------------------------------

// A dialog with the trace of a request; `onClose` is called when the user closes it.
export class TraceDialog {
  constructor(onClose) {
    this.body = h("div", { class: "trace" });
    this.title = h("h2", {});
    const close = button("close", "Close", () => this.element.close(), { autofocus: true });
    this.copy = button("copy", "Copy the request's id", () => copyText(this.id, this.copy));
    this.element = h("dialog", { class: "drawer", "aria-label": "Trace of a request" }, h("header", {}, this.title, this.copy, close), this.body);
    this.element.addEventListener("close", () => {
      this.id = null;
      onClose();
    });
    this.element.addEventListener("click", (event) => event.target === this.element && this.element.close());
  }

  async open(id) {
    this.id = id;
    this.title.textContent = id;
    this.body.replaceChildren(h("p", { class: "muted" }, "Loading…"));
    if (!this.element.open) this.element.showModal();
    while (this.id === id && this.element.open) {
      const isRunning = await this.load(id);
      if (!isRunning) return;
      await pause(1000);
    }
  }

  close() {
    if (this.element.open) this.element.close();
  }

  async load(id) {
    try {
      const trace = await getJson(`v1/requests/${encodeURIComponent(id)}/explain`);
      if (this.id === id) this.body.replaceChildren(...explained(trace));
      return trace.state === "running";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.body.replaceChildren(emptyState("clock", "No trace", error.message));
      return false;
    }
  }
}

function explained(trace) {
  const setting = trace.setting && h("p", { class: "setting" }, "It would have helped: ", h("code", {}, `${trace.setting.flag} ${trace.setting.value}`), ` – ${trace.setting.why}.`);
  const completions = trace.completions.map((each) =>
    h("section", {}, trace.completions.length > 1 && h("h3", {}, `Completion ${each.index + 1}`), timeline(each), facts(each)),
  );
  return [h("p", { class: "sentence" }, trace.state === "running" && h("span", { class: "badge running" }, "running"), ` ${trace.sentence}`), setting, ...completions].filter(Boolean);
}

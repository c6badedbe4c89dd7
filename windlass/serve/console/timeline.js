// The trace of a completion as a picture: what happened when, on one axis.

import { h, svg } from "./dom.js";
import { count, dollars, plural, seconds, tick } from "./format.js";

const ROW = 40;
const BAR = 20;
const HEAD = 26;

const BLOCKERS = {
  sequences: "all slots were taken",
  tokens: "the steps were full",
  blocks: "the KV cache was full",
  adapter: "its adapter was loading",
  "shared prefix": "another request computed the same prefix",
  batch: "its batch had not started",
  sample: "its last sample was in flight",
  grammar: "its grammar was being compiled",
  step: "a step was running",
};

// Lanes of segments { start, length, color, label, detail }, in seconds from the arrival.
export function lanesOf(completion) {
  const { server, queued, prefill, decode, preempted } = completion.seconds;
  const queueStart = server;
  const prefillStart = queueStart + queued;
  const decodeStart = prefillStart + prefill;
  const lanes = [
    { name: "HTTP", segments: [segment(0, server, 5, "", "reading, chat template, tokenizing, sending")] },
    { name: "Queue", segments: split(queueStart, queued, Object.entries(completion.queue.blocked_by), ([, length]) => length, ([name]) => ({ color: 4, label: name, detail: BLOCKERS[name] ?? name })) },
    { name: "Prefill", segments: prefillSegments(completion.prompt, prefillStart, prefill) },
    { name: "Decode", segments: [segment(decodeStart, decode, 1, plural(completion.output_tokens, "token"), decodeDetail(completion))] },
  ];
  if (preempted > 0) {
    const detail = `${plural(completion.preemptions?.count ?? 0, "preemption")}, ${plural(completion.preemptions?.recomputed_tokens ?? 0, "token")} recomputed; drawn at the end, happened in between`;
    lanes.push({ name: "Preempted", segments: [segment(decodeStart + decode, preempted, 4, "waiting again", detail)] });
  }
  return lanes;
}

const segment = (start, length, color, label, detail) => ({ start, length, color, label, detail });

// Divides a stretch of time in proportion to the recorded lengths of its parts.
function split(start, length, parts, lengthOf, describe) {
  const sum = parts.reduce((total, part) => total + lengthOf(part), 0);
  if (!sum) return [segment(start, length, 4, "", "")];
  let at = start;
  return parts.map((part) => {
    const own = (length * lengthOf(part)) / sum;
    at += own;
    return { start: at - own, length: own, ...describe(part) };
  });
}

function prefillSegments(prompt, start, length) {
  return split(start, length, prompt.chunks, (chunk) => chunk.seconds, (chunk) => ({
    color: 2,
    label: plural(chunk.num_tokens, "token"),
    detail: `positions ${count(chunk.start)} to ${count(chunk.start + chunk.num_tokens - 1)}, in a step of ${plural(chunk.step_tokens, "token")} and ${plural(chunk.step_rows, "row")}`,
  }));
}

function decodeDetail({ decode, output_tokens: tokens }) {
  const { min, median, max } = decode.batch;
  const pace = decode.seconds_per_token === null ? plural(tokens, "token") : `${seconds(decode.seconds_per_token)} per token`;
  if (min === null) return pace;
  return `${pace}, in batches of ${min === max ? min : `${min} to ${max} (median ${median})`}`;
}

export function timeline(completion) {
  const lanes = lanesOf(completion);
  const total = Math.max(completion.seconds.total, 1e-6);
  const height = HEAD + ROW * lanes.length;
  const said = lanes.map(({ name, segments }) => `${name} ${seconds(lengthOf(segments))}`).join(", ");
  const picture = svg("svg", { class: "timeline", height, role: "img", "aria-label": `Timeline: ${said}` });
  const draw = () => {
    const width = picture.clientWidth;
    if (!width) return;
    const left = width < 520 ? 70 : 96;
    const x = (time) => left + (time / total) * (width - left - 58);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.replaceChildren(...axis(total, x, height), ...lanes.flatMap((lane, at) => laneNodes(lane, at, x)));
  };
  new ResizeObserver(draw).observe(picture);
  return picture;
}

const lengthOf = (segments) => segments.reduce((sum, each) => sum + each.length, 0);

function axis(total, x, height) {
  const step = niceStep(total / 5);
  const ticks = [];
  for (let time = 0; time <= total; time += step) {
    ticks.push(
      svg("line", { class: "grid", x1: x(time), x2: x(time), y1: HEAD - 6, y2: height }),
      svg("text", { class: "tick", x: x(time), y: 12, "text-anchor": time ? "middle" : "start" }, time ? tick(seconds(time)) : "0"),
    );
  }
  return ticks;
}

function niceStep(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * unit).find((step) => step >= value);
}

function laneNodes({ name, segments }, at, x) {
  const top = HEAD + at * ROW + (ROW - BAR) / 2;
  const middle = top + BAR / 2 + 4;
  const last = segments.at(-1);
  const nodes = [svg("text", { class: "lane", x: 0, y: middle }, name)];
  segments.forEach((each, index) => {
    const from = x(each.start);
    const width = Math.max(1.5, x(each.start + each.length) - from - (index < segments.length - 1 ? 1 : 0));
    const hint = svg("title", {}, [each.label, seconds(each.length), each.detail].filter(Boolean).join(" · "));
    nodes.push(svg("rect", { class: `bar c${each.color}${index % 2 ? " alternate" : ""}`, x: from, y: top, width, height: BAR, rx: Math.min(4, width / 2) }, hint));
    if (each.label && width > each.label.length * 6.6 + 12) {
      nodes.push(svg("text", { class: "bar-label", x: from + width / 2, y: middle, "text-anchor": "middle" }, each.label));
    }
  });
  nodes.push(svg("text", { class: "length", x: x(last.start + last.length) + 7, y: middle }, seconds(lengthOf(segments))));
  return nodes;
}

// The facts below the picture.
export function facts(completion) {
  const { prompt, queue, decode, drafts, preemptions, cost } = completion;
  const blocked = Object.entries(queue.blocked_by).map(([name, time]) => `${name} ${seconds(time)}`).join(", ");
  const rows = [
    ["Prompt", `${plural(completion.prompt_tokens, "token")}, ${count(prompt.cached_tokens)} of them cached`],
    prompt.why_missed && ["Cache miss", `from position ${count(prompt.first_missed)}: ${prompt.why_missed}`],
    ["Output", `${plural(completion.output_tokens, "token")}, finish: ${completion.finish ?? "still running"}`],
    ["At arrival", `${count(queue.ahead)} queued, ${count(queue.running)} running`],
    blocked && ["Waited for", blocked],
    decode.seconds_per_token !== null && ["Per token", decodeDetail(completion)],
    decode.seconds_beside_prompts > 0 && ["Beside prompts", `${seconds(decode.seconds_beside_prompts)} in steps that also computed prompts`],
    drafts && ["Draft tokens", `${count(drafts.accepted)} of ${count(drafts.proposed)} accepted`],
    preemptions && ["Preemptions", `${count(preemptions.count)}, ${plural(preemptions.recomputed_tokens, "token")} recomputed`],
    ["Engine time", `${seconds(completion.engine_seconds.prefill)} prefill, ${seconds(completion.engine_seconds.decode)} decode, ${seconds(completion.engine_seconds.saved_by_cache)} saved by the cache`],
    cost && ["Cost", `${dollars(cost.usd)}, ${dollars(cost.saved_usd)} saved by the cache`],
  ].filter(Boolean);
  return h("dl", { class: "facts" }, rows.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
}

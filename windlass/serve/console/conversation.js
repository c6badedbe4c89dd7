// A conversation with the server: its messages, and one answer in progress.

import { ApiError, events } from "./api.js";
import { store } from "./store.js";

const SAVED = "windlass-conversation";

// A message: { role, content, isJson, reasoning, toolCalls, toolCallId, stats, error, id, stopped }.
export class Conversation {
  constructor(settings, onChange) {
    Object.assign(this, { settings, onChange, messages: restore(), controller: null });
  }

  get isBusy() {
    return this.controller !== null;
  }

  // The tool calls of the last answer that have no result yet.
  get openCalls() {
    const last = this.messages.findLast((message) => message.role !== "tool");
    const answered = new Set(this.messages.map((message) => message.toolCallId));
    return (last?.toolCalls ?? []).filter((call) => !answered.has(call.id));
  }

  say(text) {
    this.messages.push({ role: "user", content: text });
    return this.answer();
  }

  addToolResult(call, text) {
    this.messages.push({ role: "tool", toolCallId: call.id, name: call.name, content: text });
    this.changed();
    return this.openCalls.length ? null : this.answer();
  }

  // Drops the message at an index and all after it; an edited user message is sent again.
  cut(index) {
    this.stop();
    this.messages.length = index;
    this.changed();
  }

  regenerate(index) {
    this.cut(index);
    return this.answer();
  }

  clear() {
    this.cut(0);
  }

  stop() {
    this.controller?.abort();
  }

  changed(message = null) {
    if (!this.isBusy) save(this.messages);
    this.onChange(message);
  }

  // ---- requests ------------------------------------------------------------------------------

  // The path and body of the request for the next answer. Raises an Error for bad options.
  request() {
    const fields = this.settings.fields();
    const options = { stream: true, stream_options: { include_usage: true } };
    if (typeof store.info?.price_per_hour === "number") options.include_cost = true;
    if (store.info && !store.info.has_chat_template) {
      const prompt = this.messages.findLast((message) => message.role === "user")?.content ?? "";
      const { tools, tool_choice: choice, reasoning_effort: effort, ...rest } = fields;
      if (tools || choice || effort) throw new Error("The model has no chat template: tools and reasoning effort need one.");
      return { path: "v1/completions", body: { ...rest, prompt, ...options } };
    }
    const system = this.settings.values.system?.trim();
    const messages = this.messages.filter(isSaid).map(asSent);
    if (system) messages.unshift({ role: "system", content: system });
    return { path: "v1/chat/completions", body: { ...fields, messages, ...options } };
  }

  async answer() {
    const message = { role: "assistant", content: "", reasoning: "", toolCalls: [] };
    let request;
    try {
      request = this.request();
    } catch (error) {
      this.messages.push({ ...message, error: error.message });
      this.changed();
      return;
    }
    message.isJson = Boolean(request.body.response_format);
    this.messages.push(message);
    const controller = (this.controller = new AbortController());
    this.changed();
    const clock = new AnswerClock();
    try {
      for await (const event of events(request.path, request.body, controller.signal)) {
        message.id = event.id;
        clock.count(event);
        take(message, event);
        this.changed(message);
      }
    } catch (error) {
      if (controller.signal.aborted) message.stopped = true;
      else if (error instanceof ApiError) message.error = error.message;
      else message.error = "The connection to the server broke.";
    }
    message.stats = clock.stats();
    if (this.controller === controller) this.controller = null;
    this.changed();
  }
}

// Not an answer that failed or was stopped before its first token.
const isSaid = ({ role, content, toolCalls }) => role !== "assistant" || content || toolCalls.length;

function asSent({ role, content, toolCalls, toolCallId }) {
  const sent = { role, content };
  if (toolCallId) sent.tool_call_id = toolCallId;
  if (toolCalls?.length) {
    sent.tool_calls = toolCalls.map(({ id, name, arguments: args }) => ({ id, type: "function", function: { name, arguments: args } }));
  }
  return sent;
}

// Adds an event's delta to the message.
function take(message, { choices }) {
  const choice = choices[0];
  if (!choice) return;
  const delta = choice.delta ?? { content: choice.text };
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? "";
  for (const call of delta.tool_calls ?? []) {
    const known = (message.toolCalls[call.index] ??= { id: "", name: "", arguments: "" });
    known.id ||= call.id ?? "";
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

// Measures an answer as the user sees it.
class AnswerClock {
  constructor() {
    this.began = performance.now();
    this.numEvents = 0;
  }

  count(event) {
    if (event.usage) this.usage = event.usage;
    if (!event.choices.length) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.numEvents++;
  }

  stats() {
    if (!this.first) return null;
    const { usage } = this;
    const tokens = usage?.completion_tokens ?? this.numEvents;
    const decode = (this.last - this.first) / 1000;
    const drafts = usage?.completion_tokens_details ?? {};
    return {
      tokens,
      isExact: Boolean(usage),
      firstToken: (this.first - this.began) / 1000,
      perSecond: tokens > 1 && decode > 0 ? (tokens - 1) / decode : null,
      prompt: usage?.prompt_tokens ?? null,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
      accepted: drafts.accepted_prediction_tokens ?? null,
      drafted: drafts.accepted_prediction_tokens === undefined ? null : drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens,
      cost: usage?.cost ?? null,
    };
  }
}

function restore() {
  try {
    return JSON.parse(sessionStorage.getItem(SAVED)) ?? [];
  } catch {
    return []; // written by another version
  }
}

function save(messages) {
  try {
    sessionStorage.setItem(SAVED, JSON.stringify(messages));
  } catch {
    sessionStorage.removeItem(SAVED); // too long to keep: a reload starts anew
  }
}

// One message of the playground, as an element that follows its message while it grows.

import { button, copyText, h, icon } from "./dom.js";
import { count, dollars, plural, seconds } from "./format.js";
import { codeBlock, markdown } from "./markdown.js";

const ROLES = { user: "You", assistant: "Model", tool: "Tool result" };

export class MessageView {
  constructor(message, actions) {
    Object.assign(this, { message, actions, isEditing: false, forms: new Map() });
    this.element = h("article", { class: `message ${message.role}`, "aria-label": ROLES[message.role] });
    this.content = h("div", { class: "content" });
    this.reasoning = null;
    this.update(false);
  }

  update(isBusy) {
    if (this.isEditing) return;
    const { message } = this;
    const parts = [];
    if (message.reasoning) parts.push(this.reasoningPane(isBusy));
    this.content.replaceChildren(...this.contentNodes());
    if (message.content) parts.push(this.content);
    if (isBusy && !message.content && !message.reasoning && !message.toolCalls.length) parts.push(h("div", { class: "waiting", role: "status", "aria-label": "Waiting for the first token" }, h("i"), h("i"), h("i")));
    parts.push(...(message.toolCalls ?? []).map((call) => this.toolCall(call, isBusy)));
    if (message.error) parts.push(h("p", { class: "problem", role: "alert" }, message.error));
    if (!isBusy) parts.push(this.footer());
    this.element.replaceChildren(...parts);
    this.element.classList.toggle("busy", isBusy);
  }

  contentNodes() {
    const { role, content, isJson } = this.message;
    if (role !== "assistant") return [content];
    return isJson ? [codeBlock(content, "json")] : markdown(content);
  }

  reasoningPane(isBusy) {
    const { message } = this;
    this.reasoning ??= h("details", { class: "reasoning" }, h("summary", {}), h("div", {}));
    const [summary, body] = this.reasoning.children;
    summary.textContent = isBusy && !message.content ? "Thinking…" : "Reasoning";
    body.replaceChildren(...markdown(message.reasoning));
    return this.reasoning;
  }

  toolCall(call, isBusy) {
    let args = call.arguments;
    try {
      args = JSON.stringify(JSON.parse(call.arguments), null, 2);
    } catch {
      // not whole yet: shown as it arrives
    }
    const parts = [h("header", {}, icon("wrench"), h("b", {}, call.name), h("span", { class: "muted" }, "tool call")), h("pre", { tabindex: "0" }, h("code", {}, args))];
    if (!isBusy && this.actions.isOpenCall(call)) parts.push(this.forms.get(call) ?? this.resultForm(call));
    return h("div", { class: "tool-call" }, parts);
  }

  resultForm(call) {
    const input = h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}, for example {"temperature": 21}` });
    const submit = (event) => {
      event.preventDefault();
      if (input.value.trim()) this.actions.sendResult(call, input.value);
    };
    const form = h("form", { onsubmit: submit }, input, h("button", { class: "outline", type: "submit" }, "Send result"));
    this.forms.set(call, form); // keeps what was typed when another call gets its result
    return form;
  }

  footer() {
    const { message, actions } = this;
    const copy = button("copy", "Copy", () => copyText(message.content, copy));
    const tools = [message.content && copy];
    if (message.role === "user") tools.push(button("edit", "Edit and send again", () => this.edit()));
    if (message.role === "assistant") tools.push(button("again", "Regenerate", () => actions.regenerate(message)));
    if (message.id) tools.push(h("a", { class: "ghost", href: `#/requests/${encodeURIComponent(message.id)}`, title: "Trace", "aria-label": "Trace of this answer" }, icon("clock")));
    return h("footer", {}, message.role === "assistant" && h("p", { class: "stats" }, statsOf(message).map((text) => h("span", {}, text))), h("div", { class: "actions" }, tools.filter(Boolean)));
  }

  edit() {
    this.isEditing = true;
    const area = h("textarea", { class: "edit", "aria-label": "Edit the message", rows: Math.min(12, this.message.content.split("\n").length + 1), value: this.message.content });
    const close = () => {
      this.isEditing = false;
      this.update(false);
    };
    const submit = () => area.value.trim() && this.actions.resend(this.message, area.value);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      }
      event.stopPropagation();
    });
    this.element.replaceChildren(area, h("div", { class: "row end" }, button(null, "Cancel", close, { text: true }), button(null, "Send", submit, { text: true, kind: "primary" })));
    area.focus();
  }
}

function statsOf({ stats, stopped, finish }) {
  const end = stopped ? "stopped" : finish === "length" ? "reached max tokens" : null;
  if (!stats) return end ? [end] : [];
  const isCached = stats.cached !== null && stats.cached > 0;
  return [
    stats.isExact ? plural(stats.tokens, "token") : `about ${plural(stats.tokens, "token")}`,
    stats.perSecond !== null && `${stats.perSecond.toFixed(1)} tok/s`,
    `first token ${seconds(stats.firstToken)}`,
    stats.prompt !== null && (isCached ? `${count(stats.cached)} of ${plural(stats.prompt, "prompt token")} cached` : plural(stats.prompt, "prompt token")),
    stats.drafted !== null && `${count(stats.accepted)} of ${plural(stats.drafted, "draft token")} accepted`,
    stats.cost !== null && dollars(stats.cost),
    end,
  ].filter(Boolean);
}

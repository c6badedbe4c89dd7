// The chat playground: the conversation, the composer, and the options beside them.

import { Conversation } from "./conversation.js";
import { announce, button, h, icon } from "./dom.js";
import { MessageView } from "./message.js";
import { Settings } from "./settings.js";
import { subscribe } from "./store.js";

const STARTERS = ["What is a windlass?", "Explain prefix caching in three sentences.", "Write a haiku about the sea.", "List five prime numbers as a Markdown table."];

export function makePlayground() {
  const settings = new Settings(() => conversation.request());
  const conversation = new Conversation(settings, onChange);
  const views = new WeakMap();
  const actions = {
    regenerate: (message) => conversation.regenerate(conversation.messages.indexOf(message)),
    resend: (message, text) => {
      conversation.cut(conversation.messages.indexOf(message));
      conversation.say(text);
    },
    sendResult: (call, text) => conversation.addToolResult(call, text),
    isOpenCall: (call) => conversation.openCalls.includes(call),
  };

  const thread = h("div", { class: "thread", role: "log", "aria-label": "Conversation", "aria-live": "off" });
  const scroller = h("div", { class: "scroller", tabindex: "-1" }, thread);
  const input = h("textarea", { id: "prompt", rows: 1, "aria-label": "Message", placeholder: "Send a message", enterkeyhint: "send" });
  const submit = h("button", { class: "primary round", type: "submit", "aria-label": "Send", title: "Send (Enter)" }, icon("send"));
  const composer = h("form", { class: "composer", onsubmit: onSubmit }, input, submit);
  const optionsButton = button("sliders", "Options", () => settings.toggle(), { kind: "ghost only-narrow", "aria-controls": "settings" });
  const clear = button("plus", "New conversation", () => {
    conversation.clear();
    input.focus();
  }, { text: true });
  const title = h("span", { class: "model-name" });
  const element = h(
    "div",
    { class: "playground" },
    h("section", { class: "chat" }, h("header", { class: "chat-head" }, title, h("div", { class: "row" }, clear, optionsButton)), scroller, h("div", { class: "dock" }, composer, h("p", { class: "keys-hint" }, "Enter sends · Shift+Enter starts a line · Esc stops"))),
    settings.element,
  );

  function onSubmit(event) {
    event.preventDefault();
    if (conversation.isBusy) {
      conversation.stop();
      return;
    }
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    fit();
    conversation.say(text);
    scroller.scrollTop = scroller.scrollHeight;
  }

  function fit() {
    input.style.height = "auto";
    input.style.height = `${Math.min(240, input.scrollHeight)}px`;
  }

  input.addEventListener("input", fit);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!conversation.isBusy) composer.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !element.isConnected || document.querySelector("dialog[open]")) return;
    if (conversation.isBusy) conversation.stop();
    else settings.toggle(false);
  });

  // ---- drawing -------------------------------------------------------------------------------

  const grown = new Set();

  function onChange(message) {
    if (!message) {
      renderAll();
      return;
    }
    if (!grown.size) requestAnimationFrame(renderGrown);
    grown.add(message);
  }

  function keepingBottom(change) {
    const isAtBottom = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
    change();
    if (isAtBottom) scroller.scrollTop = scroller.scrollHeight;
  }

  function renderGrown() {
    // An answer that has ended meanwhile is drawn already, and the user may be typing in it.
    keepingBottom(() => [...grown].filter(isGrowing).forEach((message) => views.get(message).update(true)));
    grown.clear();
  }

  const isGrowing = (message) => conversation.isBusy && message === conversation.messages.at(-1);

  function renderAll() {
    const { messages } = conversation;
    keepingBottom(() => {
      for (const message of messages) {
        if (!views.has(message)) views.set(message, new MessageView(message, actions));
        views.get(message).update(isGrowing(message));
      }
      thread.replaceChildren(...(messages.length ? messages.map((message) => views.get(message).element) : [welcome()]));
    });
    const { isBusy } = conversation;
    const label = isBusy ? "Stop" : "Send";
    submit.replaceChildren(icon(isBusy ? "stop" : "send"));
    submit.setAttribute("aria-label", label);
    submit.title = isBusy ? "Stop (Esc)" : "Send (Enter)";
    clear.hidden = !messages.length;
    const last = messages.at(-1);
    if (!isBusy && last?.role === "assistant") announce(last.error ?? (last.stopped ? "Stopped" : "The answer is complete"));
  }

  function welcome() {
    const ideas = STARTERS.map((text) => h("button", { type: "button", class: "idea", onclick: () => conversation.say(text) }, text));
    return h("div", { class: "welcome" }, h("h1", {}, "What would you like to ask?"), h("p", { class: "muted welcome-note" }), h("div", { class: "ideas" }, ideas));
  }

  subscribe(({ info }) => {
    if (!info) return;
    title.textContent = info.model;
    const note = thread.querySelector(".welcome-note");
    if (note) note.textContent = info.has_chat_template ? `${info.model} answers here. Nothing leaves this server.` : `${info.model} has no chat template: it continues your text instead of answering.`;
  });
  renderAll();
  return {
    element,
    show: () => {
      scroller.scrollTop = scroller.scrollHeight;
      if (matchMedia("(hover: hover)").matches) input.focus(); // a phone's keyboard would cover the page
    },
  };
}

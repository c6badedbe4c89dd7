// The options of the playground: model, system prompt, sampling, tools and JSON schema.

import { button, copyText, h } from "./dom.js";
import { asCurl, asPython } from "./snippets.js";
import { store, subscribe } from "./store.js";

const SAVED = "windlass-playground";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, max: 2, step: 0.05 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["seed", "Seed", { step: 1 }],
  ["thinking_token_budget", "Thinking budget", { min: 0, step: 1 }],
];

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The current weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, year: { type: "integer" }, tags: { type: "array", items: { type: "string" } } },
  required: ["name", "year", "tags"],
  additionalProperties: false,
};

function load() {
  try {
    return JSON.parse(localStorage.getItem(SAVED)) ?? {};
  } catch {
    return {}; // written by another version
  }
}

export class Settings {
  constructor(bodyOf) {
    this.values = load();
    this.bodyOf = bodyOf; // the request that would be sent now, for the snippets
    this.model = h("select", { id: "model", onchange: () => this.set("model", this.model.value) });
    this.element = h(
      "aside",
      { class: "settings", id: "settings", "aria-label": "Options" },
      h("header", {}, h("h2", {}, "Options"), (this.closeButton = button("close", "Close the options", () => this.toggle(false), { kind: "ghost only-narrow" }))),
      field("Model", this.model, "model"),
      this.textArea("system", "System prompt", { rows: 3, placeholder: "You are a helpful assistant." }),
      h("h3", {}, "Sampling"),
      h("div", { class: "numbers" }, NUMBERS.map(([name, label, limits]) => this.number(name, label, limits))),
      this.text("stop", "Stop strings", "comma-separated"),
      this.select("reasoning_effort", "Reasoning effort", ["", "none", "low", "medium", "high"]),
      this.pane("tools", "Tools", "A list of tools in OpenAI's format.", EXAMPLE_TOOLS, this.select("tool_choice", "Tool choice", ["", "auto", "required", "none"])),
      this.pane("schema", "JSON schema", "The answer follows this schema.", EXAMPLE_SCHEMA),
      h("h3", {}, "This request as code"),
      h("div", { class: "row" }, this.snippet("Copy as curl", asCurl), this.snippet("Copy as Python", asPython)),
      button("trash", "Reset the options", () => this.reset(), { text: true, kind: "quiet" }),
    );
    subscribe(({ info, state }) => info && state && this.showModels(info, state));
  }

  set(name, value) {
    if (value === "" || value === false) delete this.values[name];
    else this.values[name] = value;
    localStorage.setItem(SAVED, JSON.stringify(this.values));
  }

  reset() {
    localStorage.removeItem(SAVED);
    this.values = {};
    for (const input of this.element.querySelectorAll("input, textarea, select")) {
      if (input.type === "checkbox") input.checked = false;
      else input.value = "";
    }
    this.element.querySelectorAll(".badge").forEach((badge) => (badge.hidden = true));
    this.element.querySelectorAll("details").forEach((pane) => (pane.open = false));
    this.model.value = store.info?.model ?? "";
  }

  toggle(isOpen = !this.element.classList.contains("open")) {
    this.element.classList.toggle("open", isOpen);
    document.body.classList.toggle("with-settings", isOpen);
    if (isOpen) this.closeButton.focus();
  }

  showModels(info, state) {
    const names = [info.model, ...Object.keys(state.adapters)];
    const known = [...this.model.options].map((option) => option.value);
    if (names.join("\n") !== known.join("\n")) {
      this.model.replaceChildren(...names.map((name, at) => h("option", { value: name }, at ? `${name} (adapter)` : name)));
    }
    if (document.activeElement !== this.model) this.model.value = names.includes(this.values.model) ? this.values.model : info.model;
    for (const [name, value] of Object.entries(info.default_sampling)) {
      const input = this.element.querySelector(`#${CSS.escape(name)}`);
      if (input) input.placeholder = value;
    }
  }

  // The fields of the request that the options set. Raises an Error for text that is not JSON.
  fields() {
    const fields = { model: this.model.value || store.info?.model };
    for (const [name] of NUMBERS) {
      if (this.values[name] !== undefined) fields[name] = Number(this.values[name]);
    }
    const stop = (this.values.stop ?? "").split(",").map((each) => each.trim()).filter(Boolean);
    if (stop.length) fields.stop = stop;
    if (this.values.reasoning_effort) fields.reasoning_effort = this.values.reasoning_effort;
    if (this.values.use_tools) {
      fields.tools = parse("tools", this.values.tools);
      if (this.values.tool_choice) fields.tool_choice = this.values.tool_choice;
    }
    if (this.values.use_schema) {
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parse("JSON schema", this.values.schema) } };
    }
    return fields;
  }

  // ---- inputs --------------------------------------------------------------------------------

  number(name, label, limits) {
    const input = h("input", { id: name, type: "number", inputmode: "decimal", placeholder: "default", ...limits, value: this.values[name] ?? "" });
    input.addEventListener("input", () => this.set(name, input.value));
    return field(label, input, name);
  }

  text(name, label, placeholder) {
    const input = h("input", { id: name, type: "text", placeholder, autocomplete: "off", value: this.values[name] ?? "" });
    input.addEventListener("input", () => this.set(name, input.value));
    return field(label, input, name);
  }

  textArea(name, label, props) {
    const input = h("textarea", { id: name, spellcheck: "false", ...props, value: this.values[name] ?? "" });
    input.addEventListener("input", () => this.set(name, input.value));
    return field(label, input, name);
  }

  select(name, label, values) {
    const input = h("select", { id: name }, values.map((value) => h("option", { value }, value || "default")));
    input.value = this.values[name] ?? "";
    input.addEventListener("change", () => this.set(name, input.value));
    return field(label, input, name);
  }

  pane(name, label, hint, example, ...more) {
    const isUsed = Boolean(this.values[`use_${name}`]);
    const badge = h("span", { class: "badge running" }, "in use");
    const mark = () => {
      this.set(`use_${name}`, use.checked);
      badge.hidden = !use.checked;
    };
    const use = h("input", { type: "checkbox", id: `use_${name}`, checked: isUsed, onchange: mark });
    badge.hidden = !isUsed;
    const area = this.textArea(name, label, { rows: 9, class: "mono", "aria-describedby": `${name}-problem` });
    const input = area.querySelector("textarea");
    const problem = h("p", { class: "problem", id: `${name}-problem`, role: "status" });
    const check = () => {
      problem.textContent = problemOf(label, input.value);
    };
    input.addEventListener("input", () => {
      use.checked = input.value.trim() !== "";
      mark();
      check();
    });
    const fill = () => {
      input.value = JSON.stringify(example, null, 2);
      input.dispatchEvent(new Event("input"));
    };
    return h(
      "details",
      { open: isUsed },
      h("summary", {}, label, " ", badge, h("span", { class: "muted" }, hint)),
      h("div", { class: "row between" }, h("label", { class: "switch" }, use, h("span", {}, "Use it")), button("plus", "Insert an example", fill, { text: true, kind: "quiet", id: `${name}-example` })),
      area,
      problem,
      more,
    );
  }

  snippet(label, make) {
    const copy = button("copy", label, () => {
      try {
        copyText(make(this.bodyOf()), copy);
      } catch (error) {
        alertIn(copy, error.message);
      }
    }, { text: true, kind: "outline" });
    return copy;
  }
}

function alertIn(element, message) {
  const note = h("p", { class: "problem", role: "alert" }, message);
  element.parentElement.after(note);
  setTimeout(() => note.remove(), 4000);
}

function field(label, input, id) {
  return h("div", { class: "field" }, h("label", { for: id }, label), input);
}

function problemOf(label, text) {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return `The ${label} is not JSON: ${error.message}`;
  }
}

function parse(label, text) {
  try {
    return JSON.parse(text ?? "");
  } catch (error) {
    throw new Error(`The option ${label} is not JSON: ${error.message}`);
  }
}

// Asks for a key where the server has keys, and keeps it for this tab.

import { key, send } from "./api.js";
import { h } from "./dom.js";

// Resolves when the server has accepted a key.
export function askForKey() {
  return new Promise((resolve) => {
    const input = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false", required: true });
    const problem = h("p", { class: "problem", role: "alert" });
    const submit = h("button", { type: "submit", class: "primary" }, "Continue");
    const form = h(
      "form",
      {},
      h("h2", {}, "This server needs a key"),
      h("p", { class: "muted" }, "A client key or an admin key. It stays in this tab and is sent to this server only."),
      h("label", { for: "key" }, "API key"),
      input,
      problem,
      submit,
    );
    const dialog = h("dialog", { class: "prompt", "aria-label": "API key" }, form);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      submit.disabled = true;
      problem.textContent = await refusal(input.value.trim());
      submit.disabled = false;
      if (problem.textContent) {
        input.select();
        return;
      }
      key.set(input.value.trim());
      dialog.remove();
      resolve();
    });
    dialog.addEventListener("close", () => dialog.showModal()); // by Esc: there is nothing behind it
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
}

// Why the server refuses a key; "": it does not.
async function refusal(value) {
  try {
    await send("console/info", { withKey: value });
    return "";
  } catch (error) {
    return error.status === 401 ? "The server does not know this key." : error.message;
  }
}

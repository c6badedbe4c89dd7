// The page: navigation, the current view, the state of the server, theme and key.

import { key, onKeyNeeded } from "./api.js";
import { makeDashboard } from "./dashboard.js";
import { button, h, icon, svg } from "./dom.js";
import { askForKey } from "./keyprompt.js";
import { makePlayground } from "./playground.js";
import { makeRequests, TraceDialog } from "./requests.js";
import { makeServer } from "./server.js";
import { forget, poll, subscribe } from "./store.js";

const VIEWS = [
  ["playground", "Playground", "chat", makePlayground],
  ["dashboard", "Dashboard", "chart", makeDashboard],
  ["requests", "Requests", "list", makeRequests],
  ["server", "Server", "server", makeServer],
];

const views = {};
const main = h("main", { id: "main", tabindex: "-1" });
const banner = h("div", { class: "banner", role: "alert", hidden: true });
const dialog = new TraceDialog(() => {
  if (location.hash.startsWith("#/requests/")) location.hash = `#/${current}`;
});
let current = "playground";

// ---- navigation ------------------------------------------------------------------------------

const links = VIEWS.map(([name, label, picture]) => h("a", { href: `#/${name}` }, icon(picture), h("span", {}, label)));

function route() {
  const [, name, id] = location.hash.split("/");
  if (id) {
    // A trace opens over the view from which it was asked for.
    if (!main.children.length) show("requests");
    dialog.open(decodeURIComponent(id));
    return;
  }
  dialog.close();
  show(name in views ? name : "playground");
}

function show(name) {
  current = name;
  document.title = `${VIEWS.find(([each]) => each === name)[1]} · Windlass`;
  links.forEach((link) => {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  if (main.firstChild === views[name].element) return;
  main.replaceChildren(views[name].element);
  views[name].show();
}

// ---- theme -----------------------------------------------------------------------------------

const THEMES = [
  ["", "auto", "Theme: as the system"],
  ["light", "sun", "Theme: light"],
  ["dark", "moon", "Theme: dark"],
];

function themeButton() {
  const at = () => THEMES.findIndex(([name]) => name === (document.documentElement.dataset.theme ?? ""));
  const paint = () => {
    const [, picture, label] = THEMES[at()];
    control.replaceChildren(icon(picture));
    control.title = label;
    control.setAttribute("aria-label", label);
  };
  const control = button("auto", "Theme", () => {
    const [name] = THEMES[(at() + 1) % THEMES.length];
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("windlass-theme", name);
    paint();
  }, { id: "theme" });
  paint();
  return control;
}

// ---- the state of the server -----------------------------------------------------------------

const dot = h("i", { class: "dot" });
const status = h("span", { class: "status-text" }, "Connecting…");
const forgetKey = button("key", "Forget the key", () => {
  key.clear();
  forget();
  location.reload();
});

function describe({ connected, problem, state }) {
  if (connected === null) return ["", "Connecting…", ""];
  if (!connected) return ["bad", "Disconnected", `${problem} The page tries again every second or two.`];
  const { status: health, reason } = state.health;
  if (health === "ok") return ["ok", "Connected", ""];
  const words = { sleeping: "Asleep", degraded: "Degraded" };
  return ["warn", words[health] ?? "Unavailable", `${reason[0].toUpperCase()}${reason.slice(1)}.`];
}

function logo() {
  const spokes = "M16 5v6.8M16 20.2V27M5 16h6.8M20.2 16H27M8.2 8.2l4.8 4.8M19 19l4.8 4.8M23.8 8.2L19 13M13 19l-4.8 4.8";
  const mark = svg("svg", { viewBox: "0 0 32 32", class: "logo", "aria-hidden": "true" }, svg("rect", { width: 32, height: 32, rx: 9 }), svg("path", { d: spokes }), svg("circle", { cx: 16, cy: 16, r: 4.2 }));
  return h("a", { class: "brand", href: "#/playground" }, mark, h("span", {}, "Windlass"));
}

function start() {
  const nav = h("nav", { "aria-label": "Views" }, links);
  const foot = h("div", { class: "side-foot" }, h("div", { class: "status", role: "status" }, dot, status), h("div", { class: "row" }, forgetKey, themeButton()));
  document.body.append(
    h("a", { class: "skip", href: "#main", onclick: (event) => (event.preventDefault(), main.focus()) }, "Skip to the content"),
    h("div", { class: "shell" }, h("div", { class: "side" }, logo(), nav, foot), h("div", { class: "stage" }, banner, main)),
    dialog.element,
  );
  onKeyNeeded(askForKey);
  for (const [name, , , make] of VIEWS) views[name] = make();
  subscribe((store) => {
    const [kind, label, text] = describe(store);
    dot.className = `dot ${kind}`;
    status.textContent = label;
    banner.className = `banner ${kind}`;
    banner.hidden = !text;
    if (banner.textContent !== text) banner.textContent = text;
    forgetKey.hidden = !key.get();
    document.body.classList.toggle("disconnected", store.connected === false);
  });
  addEventListener("hashchange", route);
  route();
  poll();
}

start();

// Builds elements. Text always becomes a text node, never HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

// Paths on a grid of 24, drawn as lines.
const ICONS = {
  chat: "M4 5h16v11H9l-5 4z",
  chart: "M4 4v16h16M8 15l4-5 3 3 5-7",
  list: "M9 6h11M9 12h11M9 18h11M4 6h.01M4 12h.01M4 18h.01",
  server: "M4 4h16v6H4zM4 14h16v6H4zM8 7h.01M8 17h.01",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.300l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  auto: "M3 5h18v11H3zM9 20h6M12 16v4",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  edit: "M4 20l1-4L16 5l3 3L8 19z",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
  check: "M5 12l5 5 9-10",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  key: "M14 10a4 4 0 1 0-3 3.9L13 16h3v3h4v-4z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  close: "M6 6l12 12M18 6L6 18",
  clock: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18M12 7v5l3 3",
  plug: "M9 3v5M15 3v5M6 8h12v4a6 6 0 0 1-12 0zM12 18v3",
  plus: "M12 5v14M5 12h14",
  down: "M6 9l6 6 6-6",
  wrench: "M15 4a5 5 0 0 0-5 7l-6 6 3 3 6-6a5 5 0 0 0 7-6l-3 3-3-1-1-3z",
};

export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

// A button with an icon; its label is read aloud and shown as a hint, or shown as text.
export function button(name, label, onclick, { text = false, kind = "ghost", ...rest } = {}) {
  const props = { "aria-label": label, title: text ? null : label };
  return h("button", { type: "button", class: kind, onclick, ...props, ...rest }, name && icon(name), text && h("span", {}, label));
}

export async function copyText(text, source) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // the clipboard API exists only on localhost and with TLS
  }
  const shown = source.querySelector(".icon");
  const done = icon("check");
  shown?.replaceWith(done);
  setTimeout(() => done.replaceWith(shown), 1200);
  announce("Copied");
}

function copyBySelection(text) {
  const area = h("textarea", { class: "visually-hidden", value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

const live = h("div", { class: "visually-hidden", role: "status", "aria-live": "polite" });

// Says a short message to screen readers.
export function announce(text) {
  if (!live.isConnected) document.body.append(live);
  live.textContent = text;
}

export function emptyState(name, title, ...lines) {
  return h("div", { class: "empty" }, icon(name), h("h2", {}, title), lines.map((line) => h("p", {}, line)));
}

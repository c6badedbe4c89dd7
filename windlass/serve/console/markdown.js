// Turns Markdown into DOM nodes. Whatever the text contains, the result has only these elements, and
// links only to http, https and mailto. HTML in the text stays text.

import { button, copyText, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const TABLE_RULE = /^ *\|?( *:?-+:? *\|)+ *:?-*:? *$/;
const MAX_DEPTH = 8;
const MAX_LINE = 8000; // characters; the time for a line grows with its square

export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, depth);
    if (node) nodes.push(node);
    at = next;
  }
  return nodes;
}

// The block that starts at a line, and the line after it.
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return fence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [h(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2])), at + 1];
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (depth < MAX_DEPTH && /^ {0,3}>/.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) return table(lines, at);
  return paragraph(lines, at);
}

function fence(lines, at) {
  const [, mark, language] = FENCE.exec(lines[at]);
  const code = [];
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(mark)) code.push(lines[end++]);
  return [codeBlock(code.join("\n"), language || "code"), end + 1];
}

export function codeBlock(text, language) {
  const copy = button("copy", "Copy code", () => copyText(text, copy));
  const head = h("div", { class: "code-head" }, h("span", {}, language), copy);
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, text)));
}

function quote(lines, at, depth) {
  const inside = [];
  while (at < lines.length && /^ {0,3}>/.test(lines[at])) inside.push(lines[at++].replace(/^ {0,3}> ?/, ""));
  return [h("blockquote", {}, blocks(inside, depth + 1)), at];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered) break;
    const inside = [item[3]];
    at++;
    while (at < lines.length && belongs(lines, at, indent.length)) inside.push(dedent(lines[at++], indent.length + 2));
    items.push(h("li", {}, tight(blocks(inside, depth + 1))));
  }
  const start = isOrdered ? parseInt(mark, 10) : 1;
  return [h(isOrdered ? "ol" : "ul", { start: start === 1 ? null : start }, items), at];
}

const dedent = (line, width) => line.slice(0, width).trimStart() + line.slice(width);

// Whether a line continues the item above it.
function belongs(lines, at, indent) {
  const line = lines[at];
  if (!line.trim()) return /^\s/.test(lines[at + 1] ?? "") && (lines[at + 1] ?? "").search(/\S/) > indent;
  if (line.search(/\S/) > indent) return true;
  return !ITEM.test(line) && lines[at - 1].trim() !== "" && !FENCE.test(line) && !HEADING.test(line);
}

// An item of one paragraph has no space around it.
function tight(nodes) {
  return nodes.length && nodes[0].tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const head = h("tr", {}, cells(lines[at]).map((cell) => h("th", {}, cell)));
  const rows = [];
  for (at += 2; at < lines.length && lines[at].includes("|"); at++) {
    rows.push(h("tr", {}, cells(lines[at]).map((cell) => h("td", {}, cell))));
  }
  return [h("div", { class: "table", tabindex: "0" }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows))), at];
}

function paragraph(lines, at) {
  const first = at++;
  while (at < lines.length && lines[at].trim() && !startsBlock(lines[at])) at++;
  const nodes = lines.slice(first, at).flatMap((line, index) => (index ? [h("br"), ...inline(line)] : inline(line)));
  return [h("p", {}, nodes), at];
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || RULE.test(line) || /^ {0,3}>/.test(line);

// Marks in the order in which they are tried at a position: how it opens and closes, and its element.
const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

export function inline(text, depth = 0) {
  if (text.length > MAX_LINE) return [text];
  const nodes = [];
  let plain = "";
  const add = (node, next) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
    at = next;
  };
  let at = 0;
  while (at < text.length) {
    const found = depth < MAX_DEPTH ? span(text, at, depth) : null;
    if (found) add(...found);
    else if (text[at] === "\\" && /[\\`*_~[\]()#>|-]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else plain += text[at++];
  }
  if (plain) nodes.push(plain);
  return nodes;
}

// The element that starts at a position, and the position after it; null: there is none.
function span(text, at, depth) {
  const char = text[at];
  if (char === "`") {
    const mark = /^`+/.exec(text.slice(at, at + 8))[0];
    const end = text.indexOf(mark, at + mark.length);
    return end < 0 ? null : [h("code", {}, text.slice(at + mark.length, end).trim()), end + mark.length];
  }
  if (char === "[") return link(text, at, depth);
  if (char === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? "")) {
    const url = /^[^\s<>"'`)\]}]+/.exec(text.slice(at, at + 2048))[0].replace(/[.,;:!?*_~]+$/, "");
    return [anchor(url, [url]) ?? url, at + url.length];
  }
  if (!"*_~".includes(char)) return null;
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    // Neither snake_case nor 2*3*4 has emphasis, and neither has a mark before a space.
    if (/\s/.test(text[from] ?? " ") || (mark.length === 1 && /\w/.test(text[at - 1] ?? ""))) return null;
    const end = text.indexOf(mark, from + 1);
    if (end < 0 || /\s/.test(text[end - 1])) continue;
    return [h(tag, {}, inline(text.slice(from, end), depth + 1)), end + mark.length];
  }
  return null;
}

function link(text, at, depth) {
  const middle = text.indexOf("](", at);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0 || text.slice(at, middle).includes("\n")) return null;
  const node = anchor(text.slice(middle + 2, end).trim().split(/\s/)[0], inline(text.slice(at + 1, middle), depth + 1));
  return node && [node, end + 1];
}

function anchor(href, children) {
  if (!URL.canParse(href) || !["http:", "https:", "mailto:"].includes(new URL(href).protocol)) return null;
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

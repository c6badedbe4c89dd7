// Renders openapi.json as a list of endpoints. All text is set as text, never as HTML.

const METHODS = ["get", "post", "patch", "delete"];
const MAX_DEPTH = 3;

function make(name, options = {}, ...children) {
  const element = document.createElement(name);
  Object.assign(element, options);
  element.append(...children);
  return element;
}

function resolve(document_, schema) {
  let found = schema;
  while (found && found.$ref) found = document_.components.schemas[found.$ref.split("/").pop()];
  return found || {};
}

function choices(schema) {
  return schema.anyOf || schema.oneOf || [schema];
}

function typeOf(document_, schema) {
  return choices(schema)
    .map((each) => {
      if (each.$ref) return each.$ref.split("/").pop();
      if (each.enum) return each.enum.map((value) => JSON.stringify(value)).join(" | ");
      if ("const" in each) return JSON.stringify(each.const);
      if (each.type === "array") return `array of ${typeOf(document_, each.items || {})}`;
      return [each.type || "any"].flat().join(" or ");
    })
    .join(" or ");
}

function limitsOf(schema) {
  const limits = [];
  for (const each of choices(schema)) {
    if ("minimum" in each) limits.push(`at least ${each.minimum}`);
    if ("maximum" in each) limits.push(`at most ${each.maximum}`);
    if ("maxLength" in each) limits.push(`at most ${each.maxLength} characters`);
    if ("maxItems" in each) limits.push(`at most ${each.maxItems} items`);
  }
  if (schema.default !== undefined && schema.default !== null) {
    limits.push(`default ${JSON.stringify(schema.default)}`);
  }
  return limits.join("; ");
}

function rowsOf(document_, schema, prefix, depth) {
  const required = schema.required || [];
  return Object.entries(schema.properties || {}).flatMap(([name, field]) => {
    const row = make(
      "tr",
      {},
      make("td", {}, make("code", { textContent: prefix + name })),
      make("td", { textContent: typeOf(document_, field) }),
      make("td", { textContent: required.includes(name) ? "required" : "" }),
      make("td", { textContent: limitsOf(field) }),
    );
    const inner = choices(field)
      .map((each) => (each.type === "array" ? each.items || {} : each))
      .filter((each) => each.$ref && depth < MAX_DEPTH)
      .flatMap((each) => rowsOf(document_, resolve(document_, each), `${prefix}${name}.`, depth + 1));
    return [row, ...inner];
  });
}

function tableOf(rows) {
  const heads = ["field", "type", "", "limits"].map((text) => make("th", { textContent: text }));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
}

function bodyOf(document_, operation) {
  const parts = [];
  for (const [media, content] of Object.entries(operation.requestBody?.content || {})) {
    for (const each of choices(content.schema)) {
      const schema = resolve(document_, each);
      parts.push(make("p", { textContent: `Body: ${schema.title || media}` }));
      parts.push(tableOf(rowsOf(document_, schema, "", 0)));
    }
  }
  return parts;
}

function commandOf(document_, method, path, operation) {
  const base = new URL(document_.servers[0].url, location.href).href.replace(/\/$/, "");
  const key = document_.security ? " -H 'Authorization: Bearer KEY'" : "";
  const verb = ["patch", "delete"].includes(method) ? ` -X ${method.toUpperCase()}` : "";
  const media = Object.keys(operation.requestBody?.content || {})[0];
  let data = method === "post" ? " -X POST" : "";
  if (media === "multipart/form-data") data = " -F purpose=batch -F file=@requests.jsonl";
  else if (media) data = " -H 'Content-Type: application/json' -d '{…}'";
  return `curl '${base}${path}'${verb}${key}${data}`;
}

function show(document_, method, path, operation) {
  const parameters = (operation.parameters || []).map((each) =>
    make(
      "tr",
      {},
      make("td", {}, make("code", { textContent: each.name })),
      make("td", { textContent: `${typeOf(document_, each.schema)} in the ${each.in}` }),
      make("td", { textContent: each.required ? "required" : "" }),
      make("td", { textContent: limitsOf(each.schema) }),
    ),
  );
  const media = Object.keys(operation.responses["200"].content).join(" or ");
  const element = make(
    "details",
    {},
    make(
      "summary",
      {},
      make("span", { className: `method ${method}`, textContent: method.toUpperCase() }),
      make("code", { textContent: path }),
      make("span", { className: "dim", textContent: operation.summary }),
    ),
    make("pre", { textContent: commandOf(document_, method, path, operation) }),
    ...(parameters.length ? [tableOf(parameters)] : []),
    ...bodyOf(document_, operation),
    make("p", { className: "dim", textContent: `Response: ${media}` }),
  );
  return element;
}

async function main() {
  const about = document.querySelector("#about");
  const response = await fetch("openapi.json");
  if (!response.ok) {
    about.textContent = `openapi.json: ${response.status} ${response.statusText}`;
    return;
  }
  const document_ = await response.json();
  about.textContent = `${document_.info.description} Version ${document_.info.version}. `;
  about.append(make("a", { href: "openapi.json", textContent: "openapi.json" }));
  const sections = new Map();
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const method of METHODS.filter((each) => methods[each])) {
      const tag = methods[method].tags[0];
      if (!sections.has(tag)) sections.set(tag, make("section", {}, make("h2", { textContent: tag })));
      sections.get(tag).append(show(document_, method, path, methods[method]));
    }
  }
  document.querySelector("#operations").append(...sections.values());
  document.querySelector("#search").addEventListener("input", (event) => {
    const text = event.target.value.toLowerCase();
    for (const section of sections.values()) {
      const all = [...section.querySelectorAll("details")];
      for (const each of all) each.hidden = !each.textContent.toLowerCase().includes(text);
      section.hidden = all.every((each) => each.hidden);
    }
  });
}

main();

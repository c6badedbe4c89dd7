// The current request as a command and as a program to copy. The key is a placeholder, never the real one.

import { key, root } from "./api.js";

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function asCurl({ path, body }) {
  const auth = key.get() ? ` \\\n  -H "Authorization: Bearer $WINDLASS_API_KEY"` : "";
  return `curl ${new URL(path, root)} \\\n  -H 'Content-Type: application/json'${auth} \\\n  -d ${quoted(JSON.stringify(body, null, 2))}\n`;
}

// The arguments that OpenAI's client knows; all others travel in extra_body.
const KNOWN = new Set([
  ...["model", "messages", "prompt", "temperature", "top_p", "max_tokens", "presence_penalty", "frequency_penalty", "seed", "stop"],
  ...["tools", "tool_choice", "response_format", "reasoning_effort", "stream", "stream_options"],
]);

export function asPython({ path, body }) {
  const isChat = path.endsWith("chat/completions");
  const { stream_options: _, include_cost: __, ...used } = body;
  const known = Object.entries(used).filter(([name]) => KNOWN.has(name));
  const extra = Object.entries(used).filter(([name]) => !KNOWN.has(name));
  const lines = known.map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra), 1)},`);
  const secret = key.get() ? 'os.environ["WINDLASS_API_KEY"]' : '"none"';
  const call = isChat ? "chat.completions" : "completions";
  const text = isChat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `${key.get() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${new URL("v1", root)}", api_key=${secret})
stream = client.${call}.create(
${lines.join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(${text} or "", end="", flush=True)
`;
}

function python(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = isList ? value.map((each) => python(each, depth + 1)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, depth + 1)}`);
  const [open, close] = isList ? "[]" : "{}";
  const short = `${open}${items.join(", ")}${close}`;
  if (short.length < 80 && !short.includes("\n")) return short;
  const indent = "    ".repeat(depth);
  return `${open}\n${items.map((item) => `${indent}    ${item},\n`).join("")}${indent}${close}`;
}

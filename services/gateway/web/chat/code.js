// The conversation as a request that can be pasted elsewhere: curl, and Python with OpenAI's client.

import { apiKey } from "./api.js";
import { byId, copyButton, el, icon } from "./dom.js";

/** body: as it would be sent, with pictures as { file: name } in the place of their data URLs. */
export function openCode(body) {
  const dialog = byId("code");
  const close = el("button.ghost.icon", { type: "button", onclick: () => dialog.close(), "aria-label": "Close" }, icon("close"));
  dialog.replaceChildren(
    el("div.dialog-head", {}, el("h2", { id: "code-title" }, "This conversation as code"), close),
    el("p.small.soft", {}, "Pictures are read from files of these names."),
    listing("Python", python(body)),
    listing("curl", curl(body)),
  );
  dialog.showModal();
}

function listing(name, text) {
  return el("div.code-block", {}, el("div.code-bar.tiny.soft", {}, el("span", {}, name), copyButton(() => text)),
    el("pre", { tabIndex: 0, role: "region", "aria-label": name }, el("code", {}, text)));
}

function filesIn(body) {
  const parts = body.messages.flatMap(({ content }) => (Array.isArray(content) ? content : []));
  return [...new Set(parts.flatMap((part) => (part.image_url ? [part.image_url.url.file] : [])))];
}

// --- curl ------------------------------------------------------------------------------------------------------------

export function curl(body) {
  const files = filesIn(body);
  const variables = files.map((file, index) => `picture${index + 1}=$(base64 < ${quoted(file)} | tr -d '\\n')`);
  // The shell fills in the pictures and must leave everything else as it is.
  const json = JSON.stringify(body, (key, value) => (value?.file ? `\u0000${files.indexOf(value.file) + 1}\u0000` : value), 2)
    .replace(/[\\$`]/g, "\\$&")
    .replace(/\\\\u0000(\d+)\\\\u0000/g, (_, number) => `data:${mediaType(files[number - 1])};base64,$picture${number}`);
  const key = apiKey.get() ? " \\\n  -H \"Authorization: Bearer $DIPTYCH_API_KEY\"" : "";
  return [...variables, `curl ${location.origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d @- <<END\n${json}\nEND\n`].join("\n");
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function mediaType(file) {
  const ending = file.split(".").pop().toLowerCase();
  return { jpg: "image/jpeg", jpeg: "image/jpeg", webp: "image/webp", gif: "image/gif" }[ending] ?? "image/png";
}

// --- Python ----------------------------------------------------------------------------------------------------------

export function python(body) {
  const hasFiles = filesIn(body).length > 0;
  const key = apiKey.get() ? "os.environ[\"DIPTYCH_API_KEY\"]" : "\"none\"";
  const imports = [hasFiles && "import base64", hasFiles && "import mimetypes", apiKey.get() && "import os"].filter(Boolean);
  const helper = `def data_url(path: str) -> str:
    with open(path, "rb") as file:
        data = base64.b64encode(file.read()).decode()
    return f"data:{mimetypes.guess_type(path)[0] or 'image/png'};base64,{data}"

`;
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");
  return `${imports.length ? `${imports.join("\n")}\n\n` : ""}from openai import OpenAI

${hasFiles ? `\n${helper}\n` : ""}client = OpenAI(base_url="${location.origin}/v1", api_key=${key})
answer = client.chat.completions.create(
${fields})
print(answer.choices[0].message.content)
`;
}

function literal(value, indent) {
  if (value?.file) return `data_url(${JSON.stringify(value.file)})`;
  const deeper = `${indent}    `;
  if (Array.isArray(value)) return `[\n${value.map((item) => `${deeper}${literal(item, deeper)},\n`).join("")}${indent}]`;
  if (typeof value === "object" && value !== null) {
    const entries = Object.entries(value);
    const flat = `{${entries.map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, deeper)}`).join(", ")}}`;
    if (flat.length < 90 && !flat.includes("\n")) return flat;
    return `{\n${entries.map(([name, item]) => `${deeper}${JSON.stringify(name)}: ${literal(item, deeper)},\n`).join("")}${indent}}`;
  }
  if (typeof value === "boolean") return value ? "True" : "False";
  return value === null ? "None" : JSON.stringify(value);
}

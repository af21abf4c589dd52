// Markdown to elements. It builds nodes and never parses HTML, so markup in an answer is text, and a link that is
// neither http(s) nor mailto stays text, too. Pictures in an answer become links: nothing is fetched from elsewhere.

import { copyButton, el } from "./dom.js";

const MAX_DEPTH = 8; // of lists in quotes in lists; what is deeper is shown as it was written
// Each of these reads a line once, however long and whatever is in it: no two neighbours may want the same characters.
const FENCE = /^ {0,3}(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s|$)/;
const RULE_START = /^ {0,3}[-*_]/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_RULE_CELL = /^:?-+:?$/;

/** Shows a growing text: only blocks that have changed since are built again. */
export class MarkdownView {
  constructor(container) {
    this.container = container;
    this.sources = [];
  }

  update(text) {
    const blocks = parseBlocks(text.replaceAll("\r\n", "\n").split("\n"));
    blocks.forEach((block, index) => {
      if (this.sources[index] === block.source) return;
      const element = render(block, 0);
      if (index < this.container.children.length) this.container.children[index].replaceWith(element);
      else this.container.append(element);
    });
    while (this.container.children.length > blocks.length) this.container.lastElementChild.remove();
    this.sources = blocks.map((block) => block.source);
  }
}

// --- blocks ----------------------------------------------------------------------------------------------------------

/** lines -> [{ kind, source, … }] */
export function parseBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at += 1; continue; }
    const { length, ...block } = readBlock(lines, at);
    blocks.push({ ...block, source: lines.slice(at, at + length).join("\n") });
    at += length;
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: headingText(line.slice(heading[0].length)), length: 1 };
  if (isRule(line)) return { kind: "rule", length: 1 };
  if (QUOTE.test(line)) {
    const length = countWhile(lines, at, (each) => QUOTE.test(each));
    return { kind: "quote", lines: lines.slice(at, at + length).map((each) => each.replace(QUOTE, "")), length };
  }
  if (ITEM.test(line)) return readList(lines, at);
  if (line.includes("|") && isTableRule(lines[at + 1] ?? "")) return readTable(lines, at);
  const length = 1 + countWhile(lines, at + 1, (each) => each.trim() && !startsBlock(each));
  return { kind: "paragraph", text: lines.slice(at, at + length).join("\n"), length };
}

const startsBlock = (line) => [FENCE, HEADING, QUOTE, ITEM].some((pattern) => pattern.test(line)) || isRule(line);

/** Three or more of one mark, and nothing else but white space. */
function isRule(line) {
  if (!RULE_START.test(line)) return false;
  const marks = line.replaceAll(/\s+/g, "");
  return marks.length >= 3 && marks === marks[0].repeat(marks.length);
}

function countWhile(lines, at, holds) {
  let count = 0;
  while (at + count < lines.length && holds(lines[at + count])) count += 1;
  return count;
}

/** Without the marks that may close it: "## Title ##". What ends in one of its own stays, "C#". */
function headingText(rest) {
  const text = rest.trim();
  let end = text.length;
  while (end > 0 && text[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

const isTableRule = (line) => cells(line).every((cell) => TABLE_RULE_CELL.test(cell));

function readCode(lines, at, [, marks, language]) {
  const isEnd = (line) => line.trim().length >= marks.length && line.trim() === marks[0].repeat(line.trim().length);
  const numInside = countWhile(lines, at + 1, (line) => !isEnd(line));
  const text = lines.slice(at + 1, at + 1 + numInside).join("\n");
  return { kind: "code", text, language: language.trim(), length: Math.min(numInside + 2, lines.length - at) };
}

function readList(lines, at) {
  const isOrdered = (match) => /\d/.test(match[2]);
  const first = ITEM.exec(lines[at]);
  const items = [];
  let index = at;
  while (index < lines.length) {
    const match = ITEM.exec(lines[index]);
    if (!match || isOrdered(match) !== isOrdered(first) || isRule(lines[index])) break;
    const indent = match[3] ? match[0].length : match[0].length + 1;
    const own = [lines[index].slice(match[0].length)];
    index += 1;
    index = readItem(lines, index, indent, own);
    items.push(own);
  }
  return { kind: "list", isOrdered: isOrdered(first), start: parseInt(first[2], 10) || 1, items, length: index - at };
}

/** Adds to `own` the lines that go on with an item; -> the first that does not. */
function readItem(lines, at, indent, own) {
  let index = at;
  while (index < lines.length) {
    const next = index + countWhile(lines, index, (each) => !each.trim()); // blank lines belong to what follows them
    if (next === lines.length) break;
    const isOwn = lines[next].startsWith(" ".repeat(Math.min(indent, 2)));
    const isAfterBlank = next > index;
    if (!isOwn && (isAfterBlank ? !ITEM.test(lines[next]) : startsBlock(lines[next]))) break;
    for (; index < next; index += 1) own.push("");
    if (!isOwn && isAfterBlank) break; // the list's next item
    own.push(unindented(lines[next], indent));
    index = next + 1;
  }
  return index;
}

function unindented(line, indent) {
  let at = 0;
  while (at < indent && line[at] === " ") at += 1;
  return line.slice(at);
}

function readTable(lines, at) {
  const head = cells(lines[at]);
  const alignment = cells(lines[at + 1]).map((rule) =>
    rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : "left");
  const numRows = countWhile(lines, at + 2, (line) => line.trim() && line.includes("|"));
  const rows = lines.slice(at + 2, at + 2 + numRows).map(cells);
  return { kind: "table", head, alignment, rows, length: 2 + numRows };
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// --- elements --------------------------------------------------------------------------------------------------------

function render(block, depth) {
  if (depth > MAX_DEPTH) return el("p", {}, block.source);
  switch (block.kind) {
    case "heading":
      // The page's own title is the first: an answer's headings begin below it.
      return el(`h${Math.min(block.level + 1, 6)}`, {}, ...inline(block.text));
    case "rule": return el("hr");
    case "code": return codeBlock(block);
    case "quote": return el("blockquote", {}, ...parseBlocks(block.lines).map((inner) => render(inner, depth + 1)));
    case "list": return list(block, depth);
    case "table": return table(block);
    default: return el("p", {}, ...inline(block.text));
  }
}

function codeBlock({ text, language }) {
  const bar = el("div.code-bar.tiny.soft", {}, el("span", {}, language || "code"), copyButton(() => text));
  return el("div.code-block", {}, bar, el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function list({ isOrdered, start, items }, depth) {
  const element = el(isOrdered ? "ol" : "ul");
  if (isOrdered && start !== 1) element.start = start;
  for (const lines of items) {
    const blocks = parseBlocks(lines);
    const [first, ...rest] = blocks;
    const isTight = first?.kind === "paragraph" && rest.every((block) => block.kind === "list");
    const content = isTight ? [...inline(first.text), ...rest.map((block) => render(block, depth + 1))]
      : blocks.map((block) => render(block, depth + 1));
    element.append(el("li", {}, ...content));
  }
  return element;
}

function table({ head, alignment, rows }) {
  const cell = (tag) => (text, index) => {
    const element = el(tag, {}, ...inline(text ?? ""));
    element.style.textAlign = alignment[index] ?? "left";
    return element;
  };
  const full = (row) => head.map((_, index) => row[index] ?? "");
  return el("div.table-scroll", { tabIndex: 0, role: "region", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map(cell("th")))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...full(row).map(cell("td")))))));
}

// --- within a line ---------------------------------------------------------------------------------------------------

// Tried in this order at every place; each gives what stands there instead. Where a third is given and matches, but the
// first does not, there is no end to it further on, so it need not be tried there: a text is read once, not once a mark.
const INLINE = [
  [/\\([!-/:-@[-`{-~])/y, ([, char]) => char],
  [/(`+)(?!`)([\s\S]*?[^`])\1(?!`)/y, ([, , code]) => el("code", {}, code.trim() || code)],
  [/`+/y, ([marks]) => marks],
  [/!?\[((?:[^\[\]\\]|\\.)*)\]\(\s*(?=\S)<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/y,
    ([whole, text, url], depth) => link(url, inline(text || url, depth)) ?? whole],
  [/<((?:https?:\/\/|mailto:)[^\s<>]+)>/y, ([whole, url]) => link(url, [url]) ?? whole],
  [/https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_~]/y, ([url]) => link(url, [url]) ?? url],
  [/\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/y, ([, text], depth) => el("strong", {}, ...inline(text, depth)), /\*\*(?=\S)/y],
  [/(?<![\p{L}\p{N}])__(?=\S)([\s\S]*?\S)__(?![\p{L}\p{N}])/yu, ([, text], depth) => el("strong", {}, ...inline(text, depth)),
    /(?<![\p{L}\p{N}])__(?=\S)/yu],
  [/~~(?=\S)([\s\S]*?\S)~~/y, ([, text], depth) => el("del", {}, ...inline(text, depth)), /~~(?=\S)/y],
  [/\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)/y, ([, text], depth) => el("em", {}, ...inline(text, depth))],
  [/(?<![\p{L}\p{N}])_(?=[^\s_])([^_]*?[^\s_])_(?![\p{L}\p{N}])/yu, ([, text], depth) => el("em", {}, ...inline(text, depth))],
  [/(?: {2,}|\\)\n|\n/y, () => el("br")],
];
const SPECIAL = /[\\`!\[<*_~\n]|https?:/g;

/** text -> nodes and strings */
export function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  const endless = new Set(); // patterns that have no end further on
  let at = 0;
  let plainFrom = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    if (!special) break;
    at = special.index;
    const found = matchAt(text, at, depth + 1, endless);
    if (!found) { at += 1; continue; }
    if (at > plainFrom) nodes.push(text.slice(plainFrom, at));
    nodes.push(found.node);
    at += found.length;
    plainFrom = at;
  }
  if (plainFrom < text.length) nodes.push(text.slice(plainFrom));
  return nodes;
}

function matchAt(text, at, depth, endless) {
  for (const [pattern, build, opening] of INLINE) {
    if (endless.has(pattern)) continue;
    const match = execAt(pattern, text, at);
    if (match) return { node: build(match, depth), length: match[0].length };
    if (opening && execAt(opening, text, at)) endless.add(pattern);
  }
  return null;
}

function execAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function link(url, content) {
  let parsed;
  try { parsed = new URL(url); } catch { return null; }
  if (!["http:", "https:", "mailto:"].includes(parsed.protocol)) return null;
  return el("a", { href: parsed.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content);
}

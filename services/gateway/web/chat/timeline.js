// Under every answer: what ran where and when, drawn from `usage.timeline` as one lane per service.

import { el, plural } from "./dom.js";

const OPEN = "diptych.timeline"; // "closed" once somebody has closed one
const MEANINGS = {
  receive: "the request arrives and is checked",
  fetch: "the picture's bytes are read", admit: "the encoder looks at the picture's header", decode: "the file becomes pixels",
  preprocess: "pixels are scaled for the model", encode: "the vision tower turns pixels into rows", store: "the rows are kept in Redis",
  transfer: "the rows come to the text engine", tokenize: "the text becomes tokens", queue: "waiting for a turn",
  prefill: "the prompt is read", decode_tokens: "the answer is written",
};
const SOURCES = {
  prefix_cache: ["prefix cache", "good", "keys and values were still in the text engine: nothing to encode, nothing to read"],
  text_engine: ["engine memory", "good", "rows were still in the text engine"],
  redis: ["Redis", "good", "rows came from Redis"],
  vision_encoder: ["encoded now", "", "rows came straight from the vision encoder"],
};
const SERVICES = { gateway: "Gateway", vision_encoder: "Vision encoder", text_engine: "Text engine" };

/** A <details> for one answer; null if the server said nothing that could be drawn. */
export function timeline(usage) {
  const story = usage?.timeline;
  if (!story?.spans?.length) return null;
  const summary = el("summary", {}, el("span.eyebrow", {}, "Timeline"), el("span.figures", {}, headline(usage)));
  const details = el("details.timeline", { open: localStorage.getItem(OPEN) !== "closed" }, summary,
    waterfall(story), tokens(usage), pictures(story), everySpan(story));
  summary.addEventListener("click", () => localStorage.setItem(OPEN, details.open ? "closed" : "open"));
  return details;
}

function headline(usage) {
  const { first_token_ms: first, total_ms: total } = usage.timeline;
  const speed = tokensPerSecond(usage);
  return [time(total), first !== null && `first word after ${time(first)}`, speed && `${speed} tokens/s`].filter(Boolean).join(" · ");
}

export function tokensPerSecond(usage) {
  const seconds = usage.timings?.decode_tokens;
  const num = usage.completion_tokens - 1; // the first one is the prefill's
  return num > 0 && seconds > 0 ? Math.round(num / seconds) : null;
}

const time = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : ms >= 10 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`);

/** "decode_tokens" -> "decode tokens" */
const stageName = (stage) => stage.replaceAll("_", " ");

/** "vision_encoder-2" -> "Vision encoder 2" */
function placeName(where) {
  const [service, number] = where.split("-");
  return [SERVICES[service] ?? service, number].filter(Boolean).join(" ");
}

// --- the waterfall ---------------------------------------------------------------------------------------------------

function waterfall({ spans, total_ms: total }) {
  const chart = el("div.waterfall", { role: "img", "aria-label": description(spans, total) });
  for (const where of placesOf(spans)) {
    for (const [index, row] of rowsOf(spans.filter((span) => span.where === where)).entries()) {
      const track = el("div.track", {}, ...row.map((span) => bar(span, total)));
      chart.append(el("div.lane", {}, el("span.place.tiny", {}, index === 0 ? placeName(where) : pictureOf(row)), track));
    }
  }
  chart.append(el("div.lane.axis", {}, el("span"), el("div.track", {}, ...ticks(total))));
  return chart;
}

/** "picture 2", if that is all the row is about */
function pictureOf(row) {
  const images = new Set(row.map((span) => span.image));
  return images.size === 1 && row[0].image !== undefined ? `picture ${row[0].image + 1}` : "";
}

const ORDER = ["gateway", "vision_encoder", "text_engine"];
function placesOf(spans) {
  const rank = (where) => ORDER.indexOf(where.split("-")[0]);
  return [...new Set(spans.map((span) => span.where))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
}

/** Spans of one place in as few rows as show all overlaps; a picture's spans stay together, apart from the request's. */
function rowsOf(spans) {
  const groups = new Map();
  for (const span of spans) {
    const key = span.image === undefined ? "request" : `${span.image}`;
    groups.set(key, [...(groups.get(key) ?? []), span]);
  }
  const rows = [];
  for (const group of groups.values()) {
    const shared = rows.find((row) => group.every((span, index) => fits(span, [...row, ...group.slice(0, index)])));
    if (shared) { shared.push(...group); continue; }
    const own = [];
    for (const span of group) {
      const row = own.find((each) => fits(span, each));
      if (row) row.push(span);
      else own.push([span]);
    }
    rows.push(...own);
  }
  return rows;
}

const ROUNDING_MS = 0.01;
const fits = (span, row) => row.every((other) =>
  span.start_ms + ROUNDING_MS >= other.start_ms + other.duration_ms ||
  other.start_ms + ROUNDING_MS >= span.start_ms + span.duration_ms);

function bar(span, total) {
  const name = stageName(span.stage);
  const element = el(`span.bar.stage-${span.stage}`, { title: sentence(span) }, el("span", {}, name));
  element.style.left = `${(100 * span.start_ms) / total}%`;
  element.style.width = `${(100 * span.duration_ms) / total}%`;
  return element;
}

function sentence(span) {
  const of = span.image === undefined ? "" : ` of picture ${span.image + 1}`;
  const from = span.source ? ` from ${span.source === "redis" ? "Redis" : "the vision encoder"}` : "";
  return `${stageName(span.stage)}${of}${from}: ${time(span.duration_ms)} from ${time(span.start_ms)} on` +
    (MEANINGS[span.stage] ? `. Here ${MEANINGS[span.stage]}.` : "");
}

function description(spans, total) {
  const longest = spans.toSorted((a, b) => b.duration_ms - a.duration_ms).slice(0, 3);
  return `Waterfall of ${plural(spans.length, "stage")} in ${time(total)}; the longest: ` +
    longest.map((span) => `${stageName(span.stage)} ${time(span.duration_ms)} on ${placeName(span.where)}`).join(", ");
}

function ticks(total) {
  const wanted = total / 5;
  const magnitude = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((each) => each * magnitude).find((each) => each >= wanted);
  const marks = [];
  for (let at = 0; at <= total * 0.97; at += step) {
    const mark = el("span.tick.tiny", {}, at === 0 ? "0" : time(at).replace(/\.0+ /, " "));
    mark.style.left = `${(100 * at) / total}%`;
    marks.push(mark);
  }
  return marks;
}

// --- tokens, pictures, the table -------------------------------------------------------------------------------------

function tokens(usage) {
  const { image_tokens: image = 0, cached_tokens: cached = 0 } = usage.prompt_tokens_details ?? {};
  const kinds = [["text", usage.prompt_tokens - image], ["picture", image], ["answer", usage.completion_tokens]];
  const whole = usage.prompt_tokens + usage.completion_tokens;
  const strip = el("div.token-strip", { "aria-hidden": "true" }, ...kinds.filter(([, count]) => count > 0).map(([kind, count]) => {
    const part = el(`span.token-${kind}`);
    part.style.flexGrow = count / whole;
    return part;
  }));
  const figure = (kind, count, words) => el("div", {}, el("dt", {}, kind && el(`span.dot.token-${kind}`), words), el("dd", {}, count.toLocaleString("en")));
  return el("div.tokens", {}, strip, el("dl", {},
    figure("text", usage.prompt_tokens - image, "text"),
    image ? figure("picture", image, "picture") : null,
    figure("", cached, "of these cached"),
    figure("answer", usage.completion_tokens, "answer")));
}

function pictures({ images = [] }) {
  const numbers = new Map(); // where rows came from, as far as that is told -> the pictures' numbers
  images.forEach(({ embedding_from: source }, index) => {
    if (source) numbers.set(source, [...(numbers.get(source) ?? []), index + 1]);
  });
  if (!numbers.size) return null;
  return el("ul.sources", {}, ...[...numbers].map(([source, these]) => {
    const [words, mood, meaning] = SOURCES[source] ?? ["unknown", "", ""];
    const who = images.length === 1 ? "Picture" : these.length === 1 ? `Picture ${these[0]}` : `Pictures ${these.join(", ")}`;
    return el("li", {}, `${who}: `, el(`span.badge${mood && `.${mood}`}`, {}, words), el("span.soft", {}, ` ${meaning}`));
  }));
}

function everySpan({ spans }) {
  const row = (span) => el("tr", {},
    el("td", {}, el(`span.dot.stage-${span.stage}`), stageName(span.stage)),
    el("td", {}, span.image === undefined ? "" : `picture ${span.image + 1}`),
    el("td", {}, placeName(span.where), span.source ? ` ← ${span.source === "redis" ? "Redis" : "vision encoder"}` : ""),
    el("td.number", {}, time(span.start_ms)), el("td.number", {}, time(span.duration_ms)));
  const head = ["stage", "of", "where", "from", "took"].map((name, index) => el(index > 2 ? "th.number" : "th", { scope: "col" }, name));
  return el("details.every-span", {}, el("summary.tiny.soft", {}, "Every stage in numbers"),
    el("div.table-scroll", { tabIndex: 0, role: "region", "aria-label": "Stages in numbers" },
      el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...spans.map(row)))));
}

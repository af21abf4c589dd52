// Building elements without ever parsing HTML: whatever a model or a server says is text.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  close: "M6 6l12 12M18 6 6 18",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "m5 13 4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 4v5h-5",
};

export const byId = (id) => document.getElementById(id);

/** el("button.primary", { type: "button", onclick }, "Send"): properties are set as such, `aria-…` as attributes. */
export function el(selector, properties = {}, ...children) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  const look = { viewBox: "0 0 24 24", "aria-hidden": "true", fill: "none", stroke: "currentColor", "stroke-width": "1.8",
    "stroke-linecap": "round", "stroke-linejoin": "round" };
  for (const [attribute, value] of Object.entries(look)) svg.setAttribute(attribute, value);
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that copies what `text()` gives, and says so. */
export function copyButton(text, label = "Copy") {
  const words = el("span", {}, label);
  const button = el("button.ghost.tiny", { type: "button", onclick: copy }, icon("copy"), words);
  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
      words.textContent = "Copied";
    } catch {
      words.textContent = "The browser refused";
    }
    setTimeout(() => { words.textContent = label; }, 1500);
  }
  return button;
}

/** What a screen reader is told, at most once a change. */
export function announce(text) {
  byId("status").textContent = text;
}

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

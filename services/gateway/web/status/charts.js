// Small charts as SVG. Widths are given by attributes, colors by classes: no style is written into the page.

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A line over the last looks, with its ground filled; `second` is drawn dashed on the same scale. */
export function spark() {
  const area = svg("path", { class: "area" });
  const trace = svg("path", { class: "trace" });
  const second = svg("path", { class: "trace second" });
  const element = svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" },
    area, second, trace);
  const draw = (values, others = [], floor = 0) => {
    const most = Math.max(floor, ...values, ...others);
    const points = line(values, most);
    trace.setAttribute("d", points);
    area.setAttribute("d", points ? `${points}L100,30L${startOf(values)},30Z` : "");
    second.setAttribute("d", line(others, most));
  };
  return { element, draw };
}

const LENGTH = 120;
const startOf = (values) => (100 * (LENGTH - values.length)) / (LENGTH - 1);

function line(values, most) {
  if (values.length < 2) return "";
  return values
    .map((value, i) => `${((100 * (LENGTH - values.length + i)) / (LENGTH - 1)).toFixed(2)},${(29 - 27 * (most ? value / most : 0)).toFixed(2)}`)
    .map((point, i) => (i ? "L" : "M") + point)
    .join("");
}

/** Shares of a whole side by side; `classes` gives each its color. */
export function bar(classes) {
  const parts = classes.map((name) => svg("rect", { class: name, y: 0, height: 10 }));
  const element = svg("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, ...parts);
  const draw = (amounts, whole) => {
    let x = 0;
    parts.forEach((part, i) => {
      const width = whole > 0 ? (100 * amounts[i]) / whole : 0;
      part.setAttribute("x", x.toFixed(3));
      part.setAttribute("width", Math.max(0, Math.min(width, 100 - x)).toFixed(3));
      x += width;
    });
  };
  return { element, draw };
}

/** Columns of the last few values. */
export function columns(length) {
  const parts = Array.from({ length }, (_, i) => svg("rect", { x: i + 0.12, width: 0.76 }));
  const element = svg("svg", { class: "passes", viewBox: `0 0 ${length} 10`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...parts);
  const draw = (values, floor) => {
    const shown = values.slice(-length);
    const most = Math.max(floor, ...shown);
    parts.forEach((part, i) => {
      const value = shown[i - length + shown.length] ?? 0;
      const height = (10 * value) / most;
      part.setAttribute("y", (10 - height).toFixed(2));
      part.setAttribute("height", height.toFixed(2));
    });
  };
  return { element, draw };
}

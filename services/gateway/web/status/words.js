// Numbers for people.

export const count = (value) => Math.round(value).toLocaleString("en");

export function brief(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(1)} k` : count(value);
}

export const rate = (value) => (value >= 100 ? count(value) : value >= 10 ? value.toFixed(0) : value.toFixed(1));

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return ["–", ""];
  if (seconds >= 10) return [seconds.toFixed(0), "s"];
  if (seconds >= 1) return [seconds.toFixed(2), "s"];
  const ms = seconds * 1000;
  return [ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2), "ms"];
}

export const spell = (seconds) => duration(seconds).join(" ").trim();

export function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000 || unit === "GB") return `${value >= 100 || unit === "B" ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return "";
}

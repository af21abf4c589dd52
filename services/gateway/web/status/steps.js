// Continuous batching on a canvas: a column for every step, a line for every sequence, below it the tokens of the step.

import { plural } from "../chat/dom.js";
import { spell } from "./words.js";

const NUM_COLUMNS = 96;
const LINE = 11;
const FOOT = 34;
const MIN_LINES = 8;

export class StepChart {
  constructor(canvas, facts) {
    this.canvas = canvas;
    this.facts = facts;
    this.steps = new Map();
    this.lanes = [];
    this.lit = null;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  clear() {
    this.steps.clear();
    this.lanes = [];
  }

  show(steps, budget) {
    const newest = Math.max(0, ...this.steps.keys());
    if (steps.length && steps.at(-1).number < newest) this.clear(); // the engine began anew
    for (const step of steps) this.steps.set(step.number, step);
    const numbers = [...this.steps.keys()].sort((a, b) => a - b);
    for (const number of numbers.slice(0, -NUM_COLUMNS)) this.steps.delete(number);
    this.budget = budget;
    this.draw();
    this.tell();
  }

  light(number) {
    this.lit = number;
    this.draw();
  }

  /** A line for each sequence of these steps; one keeps its line for as long as it is seen. */
  assign(steps) {
    const seen = new Set(steps.flatMap((step) => step.rows.map(([number]) => number)));
    this.lanes = this.lanes.map((number) => (seen.has(number) ? number : null));
    for (const number of [...seen].sort((a, b) => a - b)) {
      if (this.lanes.includes(number)) continue;
      const free = this.lanes.indexOf(null);
      if (free < 0) this.lanes.push(number);
      else this.lanes[free] = number;
    }
    while (this.lanes.at(-1) === null) this.lanes.pop();
    return new Map(this.lanes.map((number, lane) => [number, lane]));
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const steps = [...this.steps.values()].sort((a, b) => a.number - b.number);
    const lanes = this.assign(steps);
    const numLines = Math.max(MIN_LINES, this.lanes.length);
    const height = numLines * LINE + FOOT;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const paint = this.canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const styles = getComputedStyle(this.canvas);
    const color = (name) => styles.getPropertyValue(name).trim();
    const kinds = { prefill: color("--row-prefill"), image: color("--row-image"), decode: color("--row-decode") };
    const step = width / NUM_COLUMNS;
    this.most = Math.max(16, ...steps.map((each) => each.num_tokens));
    paint.fillStyle = color("--line");
    for (let lane = 0; lane < numLines; lane++) paint.fillRect(0, lane * LINE + LINE - 1, width, 0.5);
    steps.forEach((each, i) => {
      const x = (NUM_COLUMNS - steps.length + i) * step;
      for (const [number, , kind] of each.rows) {
        paint.globalAlpha = this.lit !== null && number !== this.lit ? 0.25 : 1;
        paint.fillStyle = kinds[kind];
        paint.fillRect(x + 0.5, lanes.get(number) * LINE + 1, Math.max(1, step - 1), LINE - 3);
      }
      paint.globalAlpha = 1;
      this.drawFoot(paint, each, x, step, height, kinds);
    });
    paint.fillStyle = color("--line-strong");
    paint.fillRect(0, height - FOOT + 3, width, 0.5);
  }

  /** Tokens of the step, stacked by kind, against the fullest step in sight. */
  drawFoot(paint, step, x, width, height, kinds) {
    const scale = (FOOT - 6) / this.most;
    let y = height;
    for (const kind of ["decode", "image", "prefill"]) {
      const tokens = step.rows.reduce((sum, [, number, what]) => sum + (what === kind ? number : 0), 0);
      if (!tokens) continue;
      const tall = Math.max(1, tokens * scale);
      paint.fillStyle = kinds[kind];
      paint.fillRect(x + 0.5, y - tall, Math.max(1, width - 1), tall);
      y -= tall;
    }
  }

  tell() {
    const last = [...this.steps.values()].at(-1);
    if (!last) {
      this.facts.textContent = "no step yet";
      return;
    }
    const words = `step ${last.number.toLocaleString("en")}: ${plural(last.num_rows, "sequence")}, ${last.num_tokens} of ${this.budget} tokens, ${spell(last.seconds)}`;
    this.facts.textContent = words;
    this.canvas.setAttribute("aria-label", `What each of the last ${this.steps.size} steps computed. Last, ${words}.`);
  }
}

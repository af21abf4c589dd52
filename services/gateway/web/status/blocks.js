// The KV cache's blocks on a canvas: a square each, its color what it is used for, a dot where a picture is in it.

import { el } from "../chat/dom.js";
import { count, percent } from "./words.js";

const ROLES = { ".": "free", c: "cached", p: "private", s: "shared" };
const GAP = 0.14;

/** A hue for a sequence that differs from its neighbours': steps of the golden angle. */
export const hue = (number) => (number * 137.508) % 360;

export class BlockMap {
  constructor(canvas, legend, facts) {
    this.canvas = canvas;
    this.legend = legend;
    this.facts = facts;
    this.lit = null;
    this.bySequence = false;
    this.map = null;
    this.sequences = [];
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(map, sequences) {
    this.map = map;
    this.sequences = sequences;
    this.draw();
    this.tell();
  }

  /** Show where one sequence's blocks are; null: none in particular. */
  light(number) {
    this.lit = number;
    if (this.map) this.draw();
  }

  /** As many columns as make the cells about square in a wide, low map. */
  layout(width) {
    const cells = this.map.cells.length;
    const columns = Math.max(1, Math.min(cells, Math.ceil(Math.sqrt(cells * 2.2))));
    const size = Math.min(width / columns, 26);
    return { columns: Math.floor(width / size), size };
  }

  draw() {
    if (!this.map) return;
    const width = this.canvas.clientWidth;
    if (!width) return;
    const { columns, size } = this.layout(width);
    const height = Math.ceil(this.map.cells.length / columns) * size;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const paint = this.canvas.getContext("2d");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.clearRect(0, 0, width, height);
    const styles = getComputedStyle(this.canvas);
    const color = (name) => styles.getPropertyValue(name).trim();
    const colors = Object.fromEntries(Object.entries(ROLES).map(([letter, role]) => [letter, color(`--block-${role}`)]));
    const ink = color("--ink");
    const lit = this.sequences.find((sequence) => sequence.number === this.lit);
    const isLit = new Set(lit?.cells);
    const owners = this.bySequence ? this.owners() : null;
    const side = size * (1 - GAP);
    for (let i = 0; i < this.map.cells.length; i++) {
      const letter = this.map.cells[i];
      const role = letter.toLowerCase();
      const x = (i % columns) * size;
      const y = Math.floor(i / columns) * size;
      paint.globalAlpha = lit && !isLit.has(i) ? 0.25 : 1;
      paint.fillStyle = owners?.has(i) && role === "p" ? `hsl(${hue(owners.get(i))} 52% 52%)` : colors[role];
      paint.beginPath();
      paint.roundRect(x, y, side, side, side / 6);
      paint.fill();
      if (letter !== role) {
        paint.fillStyle = ink;
        paint.globalAlpha *= 0.75;
        paint.beginPath();
        paint.arc(x + side / 2, y + side / 2, Math.max(1, side / 6), 0, 2 * Math.PI);
        paint.fill();
      }
    }
    paint.globalAlpha = 1;
    if (lit) this.drawOrder(paint, lit.cells, columns, size, side, ink);
  }

  /** The order of one sequence's blocks, as a line through them. */
  drawOrder(paint, cells, columns, size, side, ink) {
    paint.strokeStyle = ink;
    paint.lineWidth = 1.25;
    paint.globalAlpha = 0.8;
    paint.beginPath();
    cells.forEach((cell, i) => {
      const x = (cell % columns) * size + side / 2;
      const y = Math.floor(cell / columns) * size + side / 2;
      if (i) paint.lineTo(x, y);
      else paint.moveTo(x, y);
    });
    paint.stroke();
    paint.globalAlpha = 1;
  }

  owners() {
    const owners = new Map();
    for (const sequence of this.sequences) for (const cell of sequence.cells) owners.set(cell, sequence.number);
    return owners;
  }

  tell() {
    const { num_blocks: all, num_free: free, num_cached: cached, num_held: held, num_shared: shared } = this.map;
    const entries = [["free", free], ["cached", cached], ["private", held - shared], ["shared", shared]];
    this.legend.replaceChildren(
      ...entries.map(([role, number]) => el("li", {}, el(`i.swatch.${role}`, {}), `${role} `, el("b", {}, count(number)))),
      el("li", {}, el("i.swatch.picture", {}), "holds picture tokens"));
    const { block_size: size, waste, num_evictions: evicted, blocks_per_cell: per } = this.map;
    const words = `${count(all)} blocks of ${size} tokens: ${percent(held, all)} in use${held ? `, of which ${(100 * waste).toFixed(1)} % is not yet filled` : ""}; `
      + `${count(evicted)} cached blocks gave way so far.${per > 1 ? ` A square stands for ${per} blocks.` : ""}`;
    this.facts.textContent = words;
    this.canvas.setAttribute("aria-label", `Map of the KV cache's blocks. ${words}`);
  }
}

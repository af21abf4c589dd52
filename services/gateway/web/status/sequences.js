// The sequences of one engine: how much of each was found, computed, written. Pointing at one lights it everywhere.

import { el } from "../chat/dom.js";
import { bar } from "./charts.js";

export class SequenceList {
  constructor(list, none, onLight) {
    this.list = list;
    this.none = none;
    this.onLight = onLight;
    this.rows = new Map();
  }

  show(sequences) {
    this.none.hidden = sequences.length > 0;
    const numbers = new Set(sequences.map((sequence) => sequence.number));
    for (const [number, row] of this.rows) {
      if (numbers.has(number)) continue;
      row.element.remove();
      this.rows.delete(number);
      if (row.isLit) this.onLight(null);
    }
    for (const sequence of sequences) {
      if (!this.rows.has(sequence.number)) this.add(sequence.number);
      this.draw(this.rows.get(sequence.number), sequence);
    }
  }

  add(number) {
    const chart = bar(["fill-prefix", "fill-prompt", "fill-answer", "fill-todo"]);
    const words = el("span.words.soft.number", {});
    const light = (isLit) => () => {
      row.isLit = isLit;
      element.classList.toggle("lit", isLit);
      this.onLight(isLit ? number : null);
    };
    const element = el("li.sequence", { tabIndex: 0, onmouseenter: light(true), onmouseleave: light(false), onfocus: light(true), onblur: light(false) },
      el("b", {}, `№ ${number}`), chart.element, words);
    const row = { element, chart, words, isLit: false };
    this.rows.set(number, row);
    this.list.append(element);
  }

  draw({ chart, words }, sequence) {
    const { num_prompt_tokens: prompt, num_tokens: all, num_computed_tokens: done, num_cached_tokens: cached } = sequence;
    const found = Math.min(cached, done);
    const read = Math.min(done, prompt) - found;
    chart.draw([Math.max(0, found), Math.max(0, read), all - prompt, Math.max(0, prompt - Math.max(done, found))], all);
    const picture = sequence.num_image_tokens ? `, ${sequence.num_image_tokens} of a picture` : "";
    const what = sequence.awaits_image ? "waits for its picture" : sequence.status === "waiting" ? "waits" : `${all - prompt} written`;
    words.textContent = `prompt ${prompt}${picture} · ${what}`;
  }
}

// The figures of the whole system, each with its last minute.

import { el } from "../chat/dom.js";
import { spark } from "./charts.js";
import { Series } from "./history.js";

/** One figure. `show` takes its value, its unit, a line below, and what to draw. */
export class Tile {
  constructor(name) {
    this.value = el("span", {});
    this.unit = el("span.unit", {});
    this.more = el("div.more.tiny.soft", {});
    this.chart = spark();
    this.series = new Series();
    this.second = new Series();
    this.element = el("div.tile.card", {}, el("div.eyebrow", {}, name), el("div.value", {}, this.value, " ", this.unit), this.more);
    this.element.append(this.chart.element);
  }

  show(value, unit, more, drawn, alsoDrawn = null, floor = 0) {
    this.value.textContent = value;
    this.unit.textContent = unit;
    this.more.textContent = more;
    if (drawn !== null) this.series.add(drawn);
    if (alsoDrawn !== null) this.second.add(alsoDrawn);
    this.chart.draw(this.series.values, this.second.values, floor);
  }
}

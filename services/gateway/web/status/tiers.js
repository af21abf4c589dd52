// Where pictures, embeddings and prompt tokens came from: the cheapest tier first.

import { el } from "../chat/dom.js";
import { bar } from "./charts.js";
import { count, percent } from "./words.js";

class Tier {
  constructor(title, names) {
    this.names = names;
    this.chart = bar(names.map((_, i) => `share-${i}`));
    this.legend = el("ul.legend", {});
    this.element = el("div.tier", {}, el("h3.small", {}, title), this.chart.element, this.legend);
  }

  show(amounts) {
    const whole = amounts.reduce((sum, amount) => sum + amount, 0);
    this.chart.draw(amounts, whole);
    this.legend.replaceChildren(...this.names.map((name, i) =>
      el("li", {}, el(`i.swatch.share-${i}`, {}), name, " ", el("b", {}, count(amounts[i])), whole ? ` ${percent(amounts[i], whole)}` : "")));
  }
}

export class Tiers {
  constructor(place) {
    this.known = new Tier("Pictures known to the gateway from", ["its memory", "Redis", "an encode under way", "none of these: encoded"]);
    this.rows = new Tier("Embeddings given to engines by", ["their memory", "Redis", "the encoder", "no one"]);
    this.prompt = new Tier("Prompt tokens", ["found in the prefix cache", "computed"]);
    place.append(this.known.element, this.rows.element, this.prompt.element);
  }

  show(gateway, engines) {
    const { memory = 0, redis = 0, joined = 0, encoder = 0 } = gateway.images;
    this.known.show([memory, redis, joined, encoder]);
    const sum = (pick) => engines.reduce((total, state) => total + (pick(state) ?? 0), 0);
    this.rows.show(["memory", "redis", "vision_encoder", "failed"].map((source) => sum((state) => state.embeddings[source])));
    const hits = sum((state) => state.num_prefix_hits);
    this.prompt.show([hits, sum((state) => state.num_prefix_queries) - hits]);
  }
}

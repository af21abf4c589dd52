// A card for each replica of a panel. A replica that is gone is kept in sight for a minute: somebody may be looking for it.

import { el } from "../chat/dom.js";
import { bar, columns } from "./charts.js";
import { Rates, Smooth } from "./history.js";
import { brief, bytes, count, percent, rate, spell } from "./words.js";

const REMEMBERED_MS = 60_000;

class Card {
  constructor(title, id) {
    this.badge = el("span.badge", {});
    this.head = el("div.head", {}, el("i.dot", {}), el("h3", {}, title), this.badge);
    this.figures = el("dl.figures", {});
    this.element = el("li.replica.card", { id }, this.head);
    this.rates = new Rates();
    this.lastSeen = performance.now();
  }

  state(words, look) {
    this.badge.textContent = words;
    this.badge.className = `badge ${look}`;
    this.element.classList.toggle("down", look === "bad");
    this.element.classList.toggle("warn", look === "warn");
  }

  facts(pairs) {
    this.figures.replaceChildren(...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  meter(name, classes) {
    const chart = bar(classes);
    const value = el("span.number", {});
    this.element.append(el("div.meter", {}, el("span.name", {}, name), chart.element, value));
    return { draw: chart.draw, say: (words) => { value.textContent = words; } };
  }

  gone() {
    this.state("gone", "bad");
    this.hide(true);
  }

  /** What a replica that says nothing cannot show. */
  hide(isHidden) {
    // As an attribute: elements of SVG have no such property.
    for (const child of this.element.children) child.toggleAttribute("hidden", isHidden && child !== this.head);
  }
}

function condition(replica) {
  if (replica.problem) return [`not used: ${replica.problem}`, "bad"];
  if (!replica.ready) return [replica.reason ? `not ready: ${replica.reason}` : "not ready", "bad"];
  if (replica.ejected) return ["left alone after failures", "warn"];
  return replica.state ? ["ready", "good"] : ["ready, but silent", "warn"];
}

export class EncoderCard extends Card {
  constructor(number) {
    super(`Encoder ${number}`, `encoder-${number}`);
    this.queue = this.meter("queue", ["fill-queue"]);
    this.load = this.meter("tower busy", ["fill-load"]);
    this.passes = columns(48);
    this.element.append(this.figures, el("div.tiny.soft", {}, "images in each of the last passes"), this.passes.element);
    this.smooth = new Smooth();
    this.perSecond = new Smooth();
  }

  show(replica, at) {
    this.state(...condition(replica));
    const state = replica.state;
    this.hide(!state);
    if (!state) return;
    this.queue.draw([state.num_queued], state.max_queued);
    this.queue.say(`${state.num_queued} of ${state.max_queued}`);
    const busy = Math.min(1, this.smooth.add(this.rates.of("busy", state.tower_s, at)));
    this.load.draw([busy], 1);
    this.load.say(percent(busy, 1));
    const images = state.images;
    const handled = Object.values(images).reduce((sum, value) => sum + value, 0);
    const speed = this.perSecond.add(this.rates.of("images", handled, at));
    this.facts([
      ["images/s", rate(speed)],
      ["encoded", count(images.encoded ?? 0)],
      ["spared", count((images.joined ?? 0) + (images.recent ?? 0) + (images.shared ?? 0))],
      ["kept", bytes(state.recent_bytes)],
      ["shared cache", state.cache_is_up ? "up" : "away"],
    ]);
    this.passes.draw(state.passes.map((pass) => pass.num_images), 4);
  }
}

export class EngineCard extends Card {
  constructor(number, onLook) {
    super(`Engine ${number}`, `engine-${number}`);
    this.look = el("button.ghost.look", { type: "button", onclick: () => onLook(number), "aria-pressed": "false" }, "Look inside");
    this.head.append(this.look);
    this.running = this.meter("running", ["fill-queue"]);
    this.memory = this.meter("KV cache", ["fill-held", "fill-cached"]);
    this.element.append(this.figures);
    this.speed = new Smooth();
  }

  show(replica, at, isChosen) {
    this.state(...condition(replica));
    this.element.classList.toggle("chosen", isChosen);
    this.look.setAttribute("aria-pressed", String(isChosen));
    this.look.textContent = isChosen ? "Shown below" : "Look inside";
    const state = replica.state;
    this.hide(!state);
    this.look.hidden = !state;
    this.tokensPerSecond = 0;
    if (!state) return;
    this.tokensPerSecond = this.speed.add(this.rates.of("tokens", state.num_generated_tokens, at));
    this.running.draw([state.num_running], state.max_num_seqs);
    const waiting = state.num_waiting ? `, ${state.num_waiting} waiting` : "";
    this.running.say(`${state.num_running} of ${state.max_num_seqs}${waiting}`);
    const { num_held: held, num_cached: cached, num_blocks: blocks, waste } = state.blocks;
    this.memory.draw([held, cached], blocks);
    this.memory.say(`${percent(held, blocks)} + ${percent(cached, blocks)} cached`);
    this.facts([
      ["tokens/s", rate(this.tokensPerSecond)],
      ["first token", spell(state.first_token?.[0])],
      ["between tokens", spell(state.between_tokens?.[0])],
      ["waste", percent(waste, 1)],
      ["prefix hits", percent(state.num_prefix_hits, state.num_prefix_queries)],
      ...(state.num_awaiting_image ? [["waiting for a picture", count(state.num_awaiting_image)]] : []),
      ...(state.num_preemptions ? [["preempted", brief(state.num_preemptions)]] : []),
    ]);
  }
}

/** The cards of one panel, by replica number. */
export class Panel {
  constructor(list, makeCard) {
    this.list = list;
    this.makeCard = makeCard;
    this.cards = new Map();
  }

  show(replicas, at, chosen) {
    const now = performance.now();
    for (const replica of replicas) {
      if (!this.cards.has(replica.number)) {
        const card = this.makeCard(replica.number);
        this.cards.set(replica.number, card);
        this.list.append(card.element);
      }
      const card = this.cards.get(replica.number);
      card.lastSeen = now;
      card.show(replica, at, replica.number === chosen);
    }
    for (const [number, card] of this.cards) {
      if (card.lastSeen === now) continue;
      card.gone();
      if (now - card.lastSeen > REMEMBERED_MS) {
        card.element.remove();
        this.cards.delete(number);
      }
    }
  }
}

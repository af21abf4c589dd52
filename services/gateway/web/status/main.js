// The control room: looks twice a second, shows what changed. One look is one request, shared by all who watch.

import { apiKey } from "../chat/api.js";
import { byId } from "../chat/dom.js";
import { BlockMap } from "./blocks.js";
import { EncoderCard, EngineCard, Panel } from "./replicas.js";
import { Rates } from "./history.js";
import { SequenceList } from "./sequences.js";
import { StepChart } from "./steps.js";
import { Tile } from "./tiles.js";
import { Tiers } from "./tiers.js";
import { count, duration, percent, rate, spell } from "./words.js";

const SLOWEST_MS = 4000;

const tiles = {
  tokens: new Tile("Tokens written"),
  running: new Tile("Requests at work"),
  first: new Tile("To the first token"),
  between: new Tile("Between tokens"),
  memory: new Tile("KV cache in use"),
  hits: new Tile("Prefix cache"),
};
byId("tiles").append(...Object.values(tiles).map((tile) => tile.element));

let wanted = null; // the engine to look into; null: whichever the server shows
const encoders = new Panel(byId("encoders"), (number) => new EncoderCard(number));
const engines = new Panel(byId("engines"), (number) => new EngineCard(number, (chosen) => { wanted = chosen; chart.clear(); look(); }));
const tiers = new Tiers(byId("tiers"));
const map = new BlockMap(byId("blocks"), byId("legend"), byId("block-facts"));
const chart = new StepChart(byId("steps"), byId("step-facts"));
const sequences = new SequenceList(byId("sequences"), byId("no-sequences"), (number) => { map.light(number); chart.light(number); });
const prefix = new Rates();
let shownEngine = null;
let isPaused = false;
let timer = 0;

const worst = (states, name, place) => {
  const values = states.map((state) => state[name]?.[place]).filter((value) => value !== undefined && value !== null);
  return values.length ? Math.max(...values) : null;
};

function showTiles(data, states) {
  const speed = [...engines.cards.values()].reduce((sum, card) => sum + (card.tokensPerSecond ?? 0), 0);
  tiles.tokens.show(rate(speed), "tokens/s", `${count(states.reduce((sum, state) => sum + state.num_generated_tokens, 0))} since the start`, speed, null, 1);
  const running = states.reduce((sum, state) => sum + state.num_running, 0);
  const waiting = states.reduce((sum, state) => sum + state.num_waiting, 0);
  tiles.running.show(count(running), "running", `${count(waiting)} waiting, ${count(data.gateway.num_in_flight)} in the gateway`, running, waiting, 4);
  const first = data.gateway.first_token;
  tiles.first.show(...duration(first?.[0]), first ? `95 %: ${spell(first[1])} · 99 %: ${spell(first[2])}` : "no answer in the last minute", first?.[0] ?? 0, first?.[1] ?? 0);
  const [half, most, nearly] = [0, 1, 2].map((place) => worst(states, "between_tokens", place));
  tiles.between.show(...duration(half), half === null ? "no answer in the last minute" : `95 %: ${spell(most)} · 99 %: ${spell(nearly)}`, half ?? 0, most ?? 0);
  const blocks = (name) => states.reduce((sum, state) => sum + state.blocks[name], 0);
  const [held, cached, all] = [blocks("num_held"), blocks("num_cached"), blocks("num_blocks")];
  tiles.memory.show(...(all ? [String(Math.round((100 * held) / all)), "%"] : ["–", ""]), `${percent(cached, all)} more cached for later`, all ? held / all : 0, null, 1);
  const total = (name) => states.reduce((sum, state) => sum + state[name], 0);
  const queried = prefix.of("queries", total("num_prefix_queries"), data.taken_at);
  const hit = prefix.of("hits", total("num_prefix_hits"), data.taken_at);
  const [hits, queries] = [total("num_prefix_hits"), total("num_prefix_queries")];
  tiles.hits.show(...(queries ? [String(Math.round((100 * hits) / queries)), "% found"] : ["–", ""]), `${count(hits)} tokens spared`, queried ? hit / queried : (tiles.hits.series.last ?? 0), null, 1);
}

function show(data) {
  const of = (service) => data.replicas.filter((replica) => replica.service === service);
  const [seeing, speaking] = [of("vision_encoder"), of("text_engine")];
  encoders.show(seeing, data.taken_at);
  engines.show(speaking, data.taken_at, data.engine);
  const ready = (replicas) => `${replicas.filter((replica) => replica.ready).length} of ${replicas.length} ready`;
  byId("num-encoders").textContent = ready(seeing);
  byId("num-engines").textContent = ready(speaking);
  const states = speaking.map((replica) => replica.state).filter(Boolean);
  showTiles(data, states);
  tiers.show(data.gateway, states);
  showInside(data.engine, speaking.find((replica) => replica.number === data.engine)?.state);
}

function showInside(number, state) {
  byId("inside").hidden = !state?.blocks.cells;
  if (!state?.blocks.cells) return;
  if (number !== shownEngine) {
    chart.clear();
    shownEngine = number;
    byId("chosen").textContent = `text engine ${number}, ${state.model}`;
  }
  byId("block-size").textContent = state.blocks.block_size;
  map.show(state.blocks, state.sequences);
  chart.show(state.steps, state.max_num_batched_tokens);
  sequences.show(state.sequences);
}

function say(words, look) {
  byId("live").textContent = words;
  byId("live").className = `badge ${look}`;
  byId("room").classList.toggle("stale", look === "bad");
}

/** One look. Returns how long to wait before the next, in ms. */
async function lookOnce() {
  const query = wanted === null ? "" : `?engine=${wanted}`;
  const headers = apiKey.get() ? { Authorization: `Bearer ${apiKey.get()}` } : {};
  const response = await fetch(`/status/data${query}`, { headers, signal: AbortSignal.timeout(SLOWEST_MS) });
  byId("key-form").hidden = response.status !== 401;
  if (response.status === 401) {
    say("locked", "warn");
    return null;
  }
  if (!response.ok) throw new Error(`status ${response.status}`);
  const data = await response.json();
  byId("room").hidden = false;
  show(data);
  say(data.gateway.is_draining ? "gateway is leaving" : "live", data.gateway.is_draining ? "warn" : "good");
  return 1000 * data.interval_s;
}

async function look() {
  clearTimeout(timer);
  let wait = 2000;
  try {
    wait = await lookOnce();
  } catch (error) {
    say("no answer from the gateway", "bad");
    if (!(error instanceof TypeError) && error.name !== "TimeoutError") console.error(error);
  }
  clearTimeout(timer);
  if (wait !== null && !isPaused && !document.hidden) timer = setTimeout(look, wait);
}

byId("pause").onclick = () => {
  isPaused = !isPaused;
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) say("paused", "warn");
  else look();
};
byId("by-sequence").onchange = (event) => { map.bySequence = event.target.checked; map.draw(); };
byId("key-form").onsubmit = (event) => {
  event.preventDefault();
  apiKey.set(byId("key").value);
  look();
};
document.addEventListener("visibilitychange", () => { if (!document.hidden && !isPaused) look(); });
look();

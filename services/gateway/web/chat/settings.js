// How answers are to be sampled, the system prompt, and the API key where the server wants one.

import { apiKey } from "./api.js";
import { byId, el, icon } from "./dom.js";

const STORED_AS = "diptych.settings";
const DEFAULTS = { system: "", temperature: "0", topP: "", maxTokens: "", seed: "" };

const NUMBERS = [
  { name: "temperature", label: "Temperature", hint: "0 takes the likeliest word every time; 1 is lively.", min: 0, max: 2, step: "any" },
  { name: "topP", label: "Top-p", hint: "Only the likeliest words that together reach this share.", min: 0, max: 1, step: "any" },
  { name: "maxTokens", label: "Longest answer", hint: "In tokens. Empty: as long as the model's context allows.", min: 1, step: 1 },
  { name: "seed", label: "Seed", hint: "With the same seed, the same answer.", step: 1 },
];

export class Settings {
  constructor(onKey) {
    this.onKey = onKey;
    this.dialog = byId("settings");
    try {
      this.values = { ...DEFAULTS, ...JSON.parse(localStorage.getItem(STORED_AS)) };
    } catch {
      this.values = { ...DEFAULTS };
    }
    this.#draw();
  }

  open(field) {
    this.dialog.showModal();
    byId(`setting-${field ?? "system"}`).focus();
  }

  get system() { return this.values.system.trim(); }

  /** Fields of a request; what was left empty is the server's to decide. */
  sampling() {
    const { temperature, topP, maxTokens, seed } = this.values;
    const fields = { temperature, top_p: topP, max_tokens: maxTokens, seed };
    return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
  }

  #set(name, value) {
    this.values[name] = value;
    localStorage.setItem(STORED_AS, JSON.stringify(this.values));
  }

  #draw() {
    const close = el("button.ghost.icon", { type: "button", onclick: () => this.dialog.close(), "aria-label": "Close" }, icon("close"));
    const system = this.#field("system", "System prompt", "What the model is told before every conversation.",
      el("textarea", { rows: 3, value: this.values.system, oninput: (event) => this.#set("system", event.target.value) }));
    const numbers = NUMBERS.map(({ name, label, hint, ...limits }) => this.#field(name, label, hint, el("input", {
      type: "number", inputMode: "decimal", value: this.values[name], ...limits,
      oninput: (event) => { if (event.target.validity.valid) this.#set(name, event.target.value); },
    })));
    const key = this.#field("key", "API key", "Only if this server asks for one. Forgotten when the tab is closed.", el("input", {
      type: "password", autocomplete: "off", value: apiKey.get(),
      onchange: (event) => { apiKey.set(event.target.value); this.onKey(); },
    }));
    const reset = el("button.ghost", { type: "button", onclick: () => this.#reset() }, "Back to defaults");
    const done = el("button.primary", { type: "submit" }, "Done");
    const finish = (event) => { event.preventDefault(); this.dialog.close(); };
    this.dialog.replaceChildren(
      el("div.dialog-head", {}, el("h2", { id: "settings-title" }, "Settings"), close),
      el("form.fields", { onsubmit: finish }, system, el("div.pair", {}, ...numbers), key, el("div.dialog-foot", {}, reset, done)),
    );
  }

  #field(name, label, hint, input) {
    input.id = `setting-${name}`;
    input.setAttribute("aria-describedby", `hint-${name}`);
    return el("div.field", {}, el("label", { for: input.id }, label), input, el("p.tiny.soft", { id: `hint-${name}` }, hint));
  }

  #reset() {
    this.values = { ...DEFAULTS };
    localStorage.removeItem(STORED_AS);
    this.#draw();
    byId("setting-system").focus();
  }
}

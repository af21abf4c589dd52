// The question being written: its text, its pictures with what they cost, and how it is sent.

import { countTokens } from "./api.js";
import { announce, byId, el, icon, plural } from "./dom.js";
import { pictureElement, picturesIn, readPicture } from "./pictures.js";

const COUNT_AFTER_MS = 350;

export class Composer {
  /** onSend(text, pictures); context() -> { model, messages } that the question would go with, for counting. */
  constructor({ onSend, onStop, onEditLast, context }) {
    this.onSend = onSend;
    this.onEditLast = onEditLast;
    this.context = context;
    this.pictures = [];
    this.question = byId("question");
    this.isBusy = false;
    byId("composer").onsubmit = (event) => { event.preventDefault(); this.send(); };
    byId("stop").onclick = onStop;
    byId("pick").onclick = () => byId("files").click();
    byId("files").onchange = () => { this.add([...byId("files").files]); byId("files").value = ""; };
    this.question.oninput = () => { this.#grow(); this.#countSoon(); };
    this.question.onkeydown = (event) => this.#onKey(event);
    this.#takeDropsAndPastes();
  }

  get text() { return this.question.value.trim(); }

  write(text, pictures = []) {
    this.question.value = text;
    this.pictures = pictures.map((picture) => ({ picture }));
    this.#changed();
    this.question.focus();
  }

  /** Pictures the browser can read join the question; of the others a note stays until the next change. */
  async add(blobs) {
    const read = await Promise.allSettled(blobs.map((blob) => readPicture(blob)));
    for (const result of read) {
      if (result.status === "fulfilled") this.pictures.push({ picture: result.value });
      else this.pictures.push({ problem: result.reason.message });
    }
    this.#changed();
    announce(`${plural(this.pictures.filter((each) => each.picture).length, "picture")} attached`);
    this.question.focus();
  }

  send() {
    const pictures = this.pictures.flatMap(({ picture }) => (picture ? [picture] : []));
    const text = this.text || (pictures.length ? "What do you see?" : "");
    if (!text || this.isBusy) return;
    this.question.value = "";
    this.pictures = [];
    this.#changed();
    this.onSend(text, pictures);
  }

  busy(isBusy) {
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    this.isBusy = isBusy;
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    if (hadFocus) (isBusy ? byId("stop") : this.question).focus();
  }

  // --- keys, drops and pastes ---

  #onKey(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !this.question.value && !this.isBusy && this.onEditLast()) {
      event.preventDefault();
    }
  }

  #takeDropsAndPastes() {
    document.addEventListener("paste", (event) => {
      const files = picturesIn(event.clipboardData);
      if (files.length) { event.preventDefault(); this.add(files); }
    });
    document.addEventListener("dragover", (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      byId("drop-here").hidden = false;
    });
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) byId("drop-here").hidden = true; });
    document.addEventListener("drop", (event) => {
      byId("drop-here").hidden = true;
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  // --- what is shown ---

  #changed() {
    this.#draw();
    this.#grow();
    this.#countSoon();
  }

  #grow() {
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight + 2}px`;
  }

  #draw() {
    const list = byId("attached");
    list.hidden = !this.pictures.length;
    list.replaceChildren(...this.pictures.map((entry) => this.#thumbnail(entry)));
  }

  #thumbnail(entry) {
    const remove = el("button.icon", { type: "button", onclick: () => this.#remove(entry),
      "aria-label": `Remove ${entry.picture?.name ?? "this note"}` }, icon("close"));
    if (!entry.picture) return el("li.refused", {}, el("span.small", {}, entry.problem), remove);
    entry.cost = el("span.cost.tiny", {}, "…");
    return el("li", {}, pictureElement(entry.picture), entry.cost, remove);
  }

  #remove(entry) {
    this.pictures = this.pictures.filter((each) => each !== entry);
    this.#changed();
    this.question.focus();
  }

  // --- what it costs ---

  #countSoon() {
    byId("count").ariaBusy = "true";
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#count(), COUNT_AFTER_MS);
  }

  #counted(words) {
    byId("count").textContent = words;
    byId("count").ariaBusy = "false";
  }

  async #count() {
    this.counting?.abort();
    const { signal } = (this.counting = new AbortController());
    const entries = this.pictures.filter(({ picture }) => picture);
    if (!entries.length && !this.text) { this.#counted(""); return; }
    const { model, messages, images } = this.context();
    const sizes = [...images, ...entries.map(({ picture }) => picture)].map(({ width, height }) => ({ width, height }));
    const body = { model, messages: [...messages, { role: "user", content: this.text }], ...(sizes.length && { images: sizes }) };
    try {
      const counted = await countTokens(body, signal);
      entries.forEach((entry, index) => { entry.cost.textContent = plural(counted.image_tokens[images.length + index], "token"); });
      this.#counted(`${counted.count.toLocaleString("en")} of ${plural(counted.max_model_len, "token")}`);
      byId("count").classList.toggle("over", counted.count >= counted.max_model_len);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#counted("");
      for (const entry of entries) { entry.cost.textContent = "?"; entry.cost.title = error.message; }
    }
  }
}

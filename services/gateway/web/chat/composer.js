// The question being written: its text, its pictures with what they cost, and how it is sent.

import { countTokens } from "./api.js";
import { announce, byId, el, icon, plural } from "./dom.js";
import { pictureElement, picturesIn, readPicture } from "./pictures.js";

const COUNT_AFTER_MS = 350;

// An entry is { name } while its file is being read, then it has a `picture` or a `problem`.
const isBeingRead = ({ picture, problem }) => !picture && !problem;

export class Composer {
  /** onSend(text, pictures); context() -> { model, messages } that the question would go with, for counting. */
  constructor({ onSend, onStop, onEditLast, context }) {
    this.onSend = onSend;
    this.onEditLast = onEditLast;
    this.context = context;
    this.pictures = [];
    this.question = byId("question");
    this.isBusy = false;
    this.isWaiting = false; // to send, until every picture is read
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
    this.#wait(false);
    this.question.value = text;
    this.pictures = pictures.map((picture) => ({ name: picture.name, picture }));
    this.#changed();
    this.question.focus();
  }

  /** Pictures that can be read join the question; for each of the others stands a note until it is removed. */
  async add(blobs) {
    const entries = blobs.map((blob) => ({ name: blob.name || "the file" }));
    this.pictures.push(...entries);
    this.#changed();
    this.question.focus();
    const read = await Promise.allSettled(blobs.map((blob) => readPicture(blob)));
    read.forEach(({ value, reason }, index) => Object.assign(entries[index], reason ? { problem: reason.message } : { picture: value }));
    this.#changed();
    const problems = entries.flatMap(({ problem }) => problem ?? []);
    announce([...problems, `${plural(this.pictures.filter(({ picture }) => picture).length, "picture")} attached`].join(" "));
    if (this.isWaiting) this.send();
  }

  /** With every picture or not at all: waits for those that are being read, and keeps everything where one is refused. */
  send() {
    const text = this.text || (this.pictures.length ? "What do you see?" : "");
    const isAllowed = Boolean(text) && !this.isBusy;
    this.#wait(isAllowed && this.pictures.some(isBeingRead));
    if (!isAllowed || this.isWaiting) return;
    const refused = this.pictures.filter(({ problem }) => problem);
    if (refused.length) { this.#holdBack(refused); return; }
    const pictures = this.pictures.map(({ picture }) => picture);
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

  #wait(isWaiting) {
    if (isWaiting && !this.isWaiting) announce("Waiting until every picture is read");
    this.isWaiting = isWaiting;
    this.question.readOnly = isWaiting;
    byId("send").ariaDisabled = String(isWaiting);
    byId("send").textContent = isWaiting ? "Waiting…" : "Send";
  }

  #holdBack(refused) {
    const [what, them] = refused.length === 1 ? [refused[0].name, "it"] : [plural(refused.length, "file"), "them"];
    byId("unsent").textContent = `Not sent, because ${what} cannot be used. Remove ${them} first.`;
  }

  #changed() {
    byId("unsent").textContent = "";
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
      "aria-label": `Remove ${entry.name}` }, icon("close"));
    if (isBeingRead(entry)) return el("li.reading", { title: entry.name }, el("span.small", {}, "Reading…"), remove);
    if (entry.problem) return el("li.refused", {}, el("span.small", {}, entry.problem), remove);
    entry.cost = el("span.cost.tiny", {}, "…");
    return el("li", {}, pictureElement(entry.picture), entry.cost, remove);
  }

  #remove(entry) {
    this.#wait(false);
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

// One question or answer on the page.

import { copyButton, el, icon } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { pictureElement } from "./pictures.js";
import { timeline } from "./timeline.js";

const ENDINGS = { length: "The answer was cut at its longest allowed length." };

export function questionTurn(message, { onEdit }) {
  const edit = el("button.ghost.tiny", { type: "button", onclick: onEdit }, icon("edit"), "Edit");
  const pictures = message.pictures.map((picture) => el("li", {}, pictureElement(picture)));
  return el("article.turn.question", { "aria-label": "Your question" },
    pictures.length ? el("ul.pictures", {}, ...pictures) : null,
    el("div.line", {}, el("div.said", {}, el("p", {}, message.text)), el("div.actions", {}, edit, copyButton(() => message.text))));
}

/** An answer that grows: `show` what has come, then `end` it. */
export class AnswerTurn {
  constructor(message, { onRetry, onSettings }) {
    this.message = message;
    this.onSettings = onSettings;
    this.text = el("div.markdown");
    this.view = new MarkdownView(this.text);
    this.reasoning = el("p");
    this.thoughts = el("details.reasoning", { hidden: true }, el("summary.small.soft", {}, "Reasoning"), this.reasoning);
    this.notes = el("div.notes");
    const retry = el("button.ghost.tiny", { type: "button", onclick: onRetry }, icon("retry"), "Try again");
    this.actions = el("div.actions", {}, copyButton(() => message.text), retry);
    this.element = el("article.turn.answer", { "aria-label": "Answer" }, this.thoughts, this.text, this.notes, this.actions);
  }

  begin() {
    this.element.classList.add("waiting");
    this.element.setAttribute("aria-busy", "true");
    this.actions.hidden = true;
  }

  /** At most once a frame, however fast tokens come. */
  show() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.#write();
    });
  }

  #write() {
    this.view.update(this.message.text);
    this.thoughts.hidden = !this.message.reasoning;
    this.reasoning.textContent = this.message.reasoning ?? "";
  }

  end() {
    this.element.classList.remove("waiting");
    this.element.removeAttribute("aria-busy");
    this.actions.hidden = false;
    this.#write();
    const { isStopped, finish, error, usage } = this.message;
    this.notes.replaceChildren(...[
      isStopped ? el("p.small.soft", {}, "Stopped.") : null,
      ENDINGS[finish] ? el("p.small.soft", {}, ENDINGS[finish]) : null,
      error ? this.#problem(error) : null,
      timeline(usage),
    ].filter(Boolean));
  }

  #problem({ message, remedy, code }) {
    const settings = el("button.small", { type: "button", onclick: () => this.onSettings("key") }, "Enter a key");
    return el("div.notice.bad", { role: "alert" }, el("p", {}, el("strong", {}, message)), remedy ? el("p", {}, remedy) : null,
      code === "invalid_api_key" ? settings : null);
  }
}

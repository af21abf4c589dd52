// The chat page: conversations, and the story of one question. What is asked, shown and kept is in the other modules.

import * as api from "./api.js";
import { openCode } from "./code.js";
import { Composer } from "./composer.js";
import { announce, byId, el, icon } from "./dom.js";
import { ApiError } from "./errors.js";
import { dataUrl } from "./pictures.js";
import { Settings } from "./settings.js";
import { ChatStore, newChat } from "./store.js";
import { AnswerTurn, questionTurn } from "./turns.js";

const CURRENT = "diptych.chat";
const NEAR_THE_END_PX = 60;

let chat = newChat();
let running = null; // AbortController of the answer under way
let editedIndex = null; // of the question that is being changed
let imageModels = new Map(); // model id -> whether it takes pictures
const store = await ChatStore.open();
const settings = new Settings(() => showModels());
const composer = new Composer({
  onSend: ask,
  onStop: stop,
  onEditLast: () => edit(chat.messages.findLastIndex(({ role }) => role === "user")),
  context: () => ({ model: model(), messages: textOnly(earlier()), images: earlier().flatMap(({ pictures }) => pictures ?? []) }),
});

const model = () => (byId("model").disabled ? undefined : byId("model").value);

// --- what is sent ----------------------------------------------------------------------------------------------------

/** Messages before the question that is being written. */
const earlier = () => answered(chat.messages.slice(0, editedIndex ?? chat.messages.length));

/** Questions that were answered, with their answers, and a last one that waits: failed tries stay on the page only. */
function answered(messages) {
  return messages.filter((message, index) =>
    message.role === "user" ? index === messages.length - 1 || messages[index + 1].text : message.text);
}

const withSystem = (messages) => (settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages);
const textOnly = (messages) => withSystem(messages.map(({ role, text }) => ({ role, content: text })));

/** url(picture) -> what stands for its data */
async function toBody(messages, url) {
  const contents = await Promise.all(messages.map(async ({ role, text, pictures }) => {
    if (!pictures?.length) return { role, content: text };
    const parts = await Promise.all(pictures.map(async (picture) => ({ type: "image_url", image_url: { url: await url(picture) } })));
    return { role, content: [...parts, { type: "text", text }] };
  }));
  return { ...(model() && { model: model() }), messages: withSystem(contents), ...settings.sampling() };
}

// --- one question ----------------------------------------------------------------------------------------------------

async function ask(text, pictures) {
  if (editedIndex !== null) {
    chat.messages.length = editedIndex;
    stopEditing();
    showChat();
  }
  chat.title ||= text.slice(0, 60);
  chat.messages.push({ role: "user", text, pictures });
  byId("log").append(turnOf(chat.messages.length - 1).element);
  await answer();
}

async function answer() {
  const asked = chat;
  const message = { role: "assistant", text: "", model: model() };
  const question = answered(asked.messages);
  asked.messages.push(message);
  const turn = turnOf(asked.messages.length - 1);
  byId("log").append(turn.element);
  turn.begin();
  byId("welcome").hidden = true;
  scrollToEnd();
  const own = (running = new AbortController());
  composer.busy(true);
  announce("Answering");
  localStorage.setItem(CURRENT, asked.id);
  await store.save(asked);
  showChats();
  try {
    for await (const piece of api.streamChat(await toBody(question, dataUrl), own.signal)) {
      if (piece.reasoning) { message.reasoning = (message.reasoning ?? "") + piece.reasoning; turn.show(); }
      if (piece.text) { message.text += piece.text; turn.show(); }
      if (piece.finish) message.finish = piece.finish;
      if (piece.usage) message.usage = piece.usage;
    }
    announce(`Answer: ${message.text}`);
  } catch (error) {
    if (error.name === "AbortError") { message.isStopped = true; announce("Stopped"); }
    else message.error = problem(error);
  } finally {
    turn.end();
    if (running === own) { running = null; composer.busy(false); }
    if (store.chats.has(asked.id)) await store.save(asked);
  }
}

function problem(error) {
  if (!(error instanceof ApiError)) console.error(error);
  const { message, code, remedy } = error instanceof ApiError ? error : new ApiError(`The page failed: ${error.message}`);
  return { message, code, remedy };
}

function stop() {
  running?.abort(); // closing the request is what cancels the work on the server
}

function edit(index) {
  if (index < 0 || running) return false;
  editedIndex = index;
  byId("editing").hidden = false;
  const { text, pictures } = chat.messages[index];
  composer.write(text, pictures);
  return true;
}

function stopEditing() {
  editedIndex = null;
  byId("editing").hidden = true;
}

async function retry(index) {
  if (running) return;
  chat.messages.length = index;
  showChat();
  await answer();
}

// --- the conversation on the page ------------------------------------------------------------------------------------

function turnOf(index) {
  const message = chat.messages[index];
  if (message.role === "user") return { element: questionTurn(message, { onEdit: () => edit(index) }), end() {} };
  return new AnswerTurn(message, { onRetry: () => retry(index), onSettings: (field) => settings.open(field) });
}

function showChat() {
  byId("log").replaceChildren(...chat.messages.map((_, index) => {
    const turn = turnOf(index);
    turn.end();
    return turn.element;
  }));
  byId("welcome").hidden = chat.messages.length > 0;
  byId("title").textContent = chat.title || "New chat";
  document.title = chat.title ? `${chat.title} · Diptych` : "Diptych";
}

let isAtEnd = true; // who has scrolled up to read is left there
function scrollToEnd() {
  isAtEnd = true;
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}
byId("scroll").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = byId("scroll");
  isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_THE_END_PX;
});
// Words come, pictures load, the question below grows: the end stays in view.
const keepAtEnd = new ResizeObserver(() => { if (isAtEnd && chat.messages.length) scrollToEnd(); });
keepAtEnd.observe(byId("log"));
keepAtEnd.observe(byId("scroll"));

// --- conversations ---------------------------------------------------------------------------------------------------

function open(next) {
  stop();
  stopEditing();
  chat = next;
  localStorage.setItem(CURRENT, chat.id);
  composer.write("");
  showChat();
  showChats();
  showSidebar(false);
  scrollToEnd();
}

function showChats() {
  byId("clear-chats").hidden = !store.chats.size;
  byId("chats").replaceChildren(...store.list().map((each) => {
    const isCurrent = each.id === chat.id;
    const go = el("button.ghost", { type: "button", onclick: () => open(each), ...(isCurrent && { "aria-current": "true" }) },
      el("span.title", {}, each.title));
    const remove = el("button.ghost.icon", { type: "button", onclick: () => forget(each), "aria-label": `Delete “${each.title}”` }, icon("close"));
    return el("li", {}, go, remove);
  }));
}

async function forget(each) {
  if (each.id === chat.id) open(newChat());
  await store.delete(each.id);
  showChats();
}

function showSidebar(isOpen) {
  document.body.classList.toggle("sidebar-open", isOpen);
  byId("open-sidebar").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) byId("new-chat").focus();
}

// --- models and samples ----------------------------------------------------------------------------------------------

async function showModels() {
  const select = byId("model");
  try {
    const models = await api.models();
    imageModels = new Map(models.map(({ id, supports_images: takes }) => [id, takes]));
    select.replaceChildren(...models.map(({ id }) => el("option", {}, id)));
    select.disabled = !models.length;
    if (!models.length) select.replaceChildren(el("option", {}, "no model is ready yet"));
    const takesPictures = [...imageModels.values()].some(Boolean) || !models.length;
    byId("pick").hidden = !takesPictures;
    byId("welcome-title").textContent = takesPictures ? "Ask about a picture" : "Ask anything";
    byId("welcome-text").textContent = takesPictures ? "Drop one here, paste one, or try one of these." : "";
  } catch (error) {
    select.replaceChildren(el("option", {}, error.code === "unreachable" ? "the server cannot be reached" : "no access"));
    select.disabled = true;
    if (error.code === "invalid_api_key") settings.open("key");
  }
}

async function showSamples() {
  const samples = await api.samples();
  if (!samples.length) byId("welcome-text").textContent = "Drop one here or paste one.";
  byId("samples").replaceChildren(...samples.map(({ url, about, questions }) => {
    const question = questions[0] ?? "What do you see?";
    const image = el("img", { src: url, alt: "", width: 384, height: 384, loading: "lazy" });
    const button = el("button", { type: "button", "aria-label": `Ask about the picture “${about}”: ${question}`, onclick: askSample },
      image, el("span.small", {}, question));
    async function askSample() {
      if (running) return;
      const file = new File([await api.blobOf(url)], url.split("/").pop());
      await composer.add([file]);
      byId("question").value = question;
      composer.send();
    }
    return el("li", {}, button);
  }));
}

// --- at the start ----------------------------------------------------------------------------------------------------

byId("new-chat").onclick = () => { open(newChat()); byId("question").focus(); };
byId("open-sidebar").onclick = () => showSidebar(true);
byId("close-sidebar").onclick = byId("veil").onclick = () => { showSidebar(false); byId("open-sidebar").focus(); };
byId("open-settings").onclick = () => settings.open();
byId("stop-editing").onclick = () => { stopEditing(); composer.write(""); };
byId("clear-chats").onclick = async () => {
  if (!confirm("Delete every conversation kept in this browser?")) return;
  open(newChat());
  await store.clear();
  showChats();
};
byId("open-code").onclick = async () => {
  const messages = answered(chat.messages.slice(0, chat.messages.findLastIndex(({ role }) => role === "user") + 1));
  const hello = [{ role: "user", text: composer.text || "Hello!", pictures: [] }];
  openCode(await toBody(messages.length ? messages : hello, ({ name }) => ({ file: name })));
};
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, select, dialog");
  if (event.key === "Escape" && !event.target.closest("dialog")) {
    if (document.body.classList.contains("sidebar-open")) showSidebar(false);
    else if (editedIndex !== null) { stopEditing(); composer.write(""); }
    else stop();
  } else if (event.key === "/" && !isTyping) {
    event.preventDefault();
    byId("question").focus();
  } else if (event.key.toLowerCase() === "n" && event.altKey) {
    event.preventDefault();
    byId("new-chat").click();
  }
});
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}

chat = store.chats.get(localStorage.getItem(CURRENT)) ?? chat;
showChat();
showChats();
scrollToEnd();
if (matchMedia("(pointer: fine)").matches) byId("question").focus();
await Promise.all([showModels(), showSamples().catch(() => {})]);
document.body.dataset.ready = "yes";

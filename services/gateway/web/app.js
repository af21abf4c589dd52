// The chat page: a picture, a question, the answer as it comes. Talks to the same API as any other client.

const $ = (id) => document.getElementById(id);
const messages = [];        // the conversation as the API wants it
let picture = null;         // data URL of the chosen picture
let running = null;         // AbortController of the answer under way

// --- choosing a picture ----------------------------------------------------------------------------------------------

function readAsDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

async function choose(blob, questions = []) {
  picture = await readAsDataUrl(blob);
  $("picture").src = picture;
  $("preview").hidden = false;
  suggest(questions);
  $("question").focus();
}

function forgetPicture() {
  picture = null;
  $("preview").hidden = true;
  $("picture").removeAttribute("src");
  $("file").value = "";
  suggest([]);
}

function suggest(questions) {
  $("suggestions").replaceChildren(...questions.map((text) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.onclick = () => { $("question").value = text; $("ask").requestSubmit(); };
    return button;
  }));
}

const imageIn = (items) => [...items].find((item) => item.type.startsWith("image/"));

$("file").onchange = () => $("file").files[0] && choose($("file").files[0]);
$("drop-picture").onclick = forgetPicture;
document.addEventListener("paste", (event) => {
  const image = imageIn(event.clipboardData.files);
  if (image) { event.preventDefault(); choose(image); }
});
document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  const image = imageIn(event.dataTransfer.files);
  if (image) choose(image);
});

// --- showing the conversation ----------------------------------------------------------------------------------------

function addTurn(role, text, image) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  if (image) {
    const shown = document.createElement("img");
    shown.src = image;
    shown.alt = "The picture that was asked about";
    turn.append(shown);
  }
  const paragraph = document.createElement("p");
  paragraph.textContent = text;
  turn.append(paragraph);
  $("log").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

function note(turn, text, kind) {
  const line = document.createElement("div");
  line.className = kind;
  line.textContent = text;
  turn.append(line);
  turn.scrollIntoView({ block: "end" });
}

function summary(usage, seconds) {
  const details = usage.prompt_tokens_details ?? {};
  const prompt = `${usage.prompt_tokens} prompt tokens (${details.image_tokens ?? 0} image, ${details.cached_tokens ?? 0} cached)`;
  return `${prompt} · ${usage.completion_tokens} generated · ${seconds.toFixed(2)} s`;
}

// --- asking ----------------------------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function problem(response) {
  if (response.status === 401) $("key-row").hidden = false;
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
}

async function* serverEvents(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

async function answer(turn) {
  const shown = turn.querySelector("p");
  const begun = performance.now();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal: running.signal,
    body: JSON.stringify({ messages, temperature: 0, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw await problem(response);
  let text = "";
  for await (const data of serverEvents(response)) {
    if (data === "[DONE]") return text;
    const chunk = JSON.parse(data);
    if (chunk.error) throw Object.assign(new Error(chunk.error.message), { text });
    const piece = chunk.choices[0]?.delta?.content;
    if (piece) { text += piece; shown.textContent = text; turn.scrollIntoView({ block: "end" }); }
    if (chunk.usage) note(turn, summary(chunk.usage, (performance.now() - begun) / 1000), "quiet");
  }
  throw Object.assign(new Error("The connection ended before the answer did."), { text });
}

async function ask(question) {
  const parts = picture ? [{ type: "image_url", image_url: { url: picture } }] : [];
  messages.push({ role: "user", content: [...parts, { type: "text", text: question }] });
  addTurn("user", question, picture);
  forgetPicture();
  const turn = addTurn("assistant waiting", "");
  running = new AbortController();
  busy(true);
  try {
    messages.push({ role: "assistant", content: await answer(turn) });
  } catch (error) {
    const said = turn.querySelector("p").textContent;
    // What was said stays in the conversation; a question without any answer does not.
    if (said) messages.push({ role: "assistant", content: said }); else messages.pop();
    if (error.name === "AbortError") note(turn, "Stopped.", "quiet");
    else note(turn, error instanceof TypeError ? "The server cannot be reached." : error.message, "error");
  } finally {
    turn.classList.remove("waiting");
    running = null;
    busy(false);
  }
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const question = $("question").value.trim() || (picture ? "What is in the picture?" : "");
  if (!question || running) return;
  $("question").value = "";
  ask(question);
};
$("stop").onclick = () => running?.abort();   // closing the request is what cancels it on the server
$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
};
$("clear").onclick = () => {
  running?.abort();
  messages.length = 0;
  $("log").replaceChildren();
  forgetPicture();
};

// --- at the start ----------------------------------------------------------------------------------------------------

async function showModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) { await problem(response); return; }
  const { data } = await response.json();
  $("model").textContent = data.length ? data.map((model) => model.id).join(", ") : "no model is ready yet";
}

async function showSamples() {
  const samples = await (await fetch("/samples/index.json")).json();
  $("samples").hidden = !samples.length;
  $("samples").replaceChildren(...samples.map((sample) => {
    const button = document.createElement("button");
    const image = document.createElement("img");
    image.src = sample.url;
    image.alt = button.title = sample.about;
    button.type = "button";
    button.append(image);
    button.onclick = async () => choose(await (await fetch(sample.url)).blob(), sample.questions);
    return button;
  }));
}

showModel().catch(() => { $("model").textContent = "the server cannot be reached"; });
showSamples().catch(() => {});
$("key").onchange = () => showModel();

// The server's API as any other client uses it. Nothing here knows the page.

import { ApiError } from "./errors.js";

const KEY = "diptych.key";

// Kept for this tab only: a key is a secret, and a browser's storage is not a safe.
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key.trim()),
};

async function call(path, { body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    const method = body === undefined ? "GET" : "POST";
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", { code: "unreachable" });
  }
  if (!response.ok) throw await ApiError.of(response);
  return response;
}

export const models = async () => (await (await call("/v1/models")).json()).data;
export const samples = async () => (await call("/samples/index.json")).json();
export const blobOf = async (url) => (await call(url)).blob();

/** { count, max_model_len, image_tokens } of a prompt with pictures of these sizes. */
export const countTokens = async (body, signal) => (await call("/v1/tokenize", { body, signal })).json();

/** Yields { text } and { reasoning } as they come, { finish } and { usage }. Aborting the signal cancels the work on the server. */
export async function* streamChat(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await call("/v1/chat/completions", { body: asked, signal });
  for await (const data of serverEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, { code: chunk.error.code });
    const choice = chunk.choices[0];
    if (choice?.delta?.reasoning_content) yield { reasoning: choice.delta.reasoning_content };
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
  throw new ApiError("The connection ended before the answer did.", { code: "broken_off" });
}

async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await read(reader);
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete.", { code: "broken_off" });
  }
}

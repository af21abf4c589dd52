// What went wrong, in words, and what can be done about it. The codes are those of the API's error table.

const REMEDIES = {
  context_length_exceeded: "Start a new chat, send fewer pictures, or lower the answer's length under Settings.",
  unsupported_feature: "Choose another model, or leave that out.",
  invalid_image: "Send the whole file again.",
  unsupported_image_format: "Convert the picture to PNG, JPEG or WebP.",
  image_too_large: "Scale the picture down first.",
  invalid_api_key: "Enter an API key under Settings.",
  model_not_found: "Choose another model at the top.",
  payload_too_large: "Send fewer or smaller pictures at once.",
  rate_limit_exceeded: "Wait a moment, then try again.",
  overloaded: "The server is busy. Wait a moment, then try again.",
  not_ready: "A part of the server is not running, or is still starting. Try again in a moment.",
  upstream_failed: "Try again; if it happens again, look into the server's log.",
  upstream_timeout: "Try again; if it happens again, look into the server's log.",
  encode_failed: "Try again once; then try another picture.",
  internal_error: "This is a defect of the server. Its log has the details.",
  invalid_value: "Check the values under Settings.",
  unreachable: "Check that the server is running and that you are connected to it.",
  broken_off: "What has arrived is kept. Try again for a whole answer.",
};

export class ApiError extends Error {
  /** code: of the API, or "unreachable" or "broken_off". retryAfter: seconds, or null. */
  constructor(message, { code = "", status = 0, retryAfter = null } = {}) {
    super(message);
    this.code = code;
    this.status = status;
    this.retryAfter = retryAfter;
  }

  get remedy() {
    const words = REMEDIES[this.code] ?? (this.status >= 500 ? REMEDIES.upstream_failed : "");
    return this.retryAfter ? `${words} The server asks for ${this.retryAfter} s of patience.`.trim() : words;
  }

  static async of(response) {
    const body = await response.json().catch(() => null);
    const { message = `The server answered with status ${response.status}.`, code } = body?.error ?? {};
    const retryAfter = Number(response.headers.get("retry-after")) || null;
    return new ApiError(message, { code, status: response.status, retryAfter });
  }
}

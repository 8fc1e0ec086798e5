// The server that sent this page: what is asked of it, and what it refuses.

// Codes of google.rpc.Status that an error within a stream, which has no status of HTTP, may have of the request's own fault.
const FINAL = [3, 5, 7, 9, 11, 12];

/** An answer that is an error. `status` is 0 where there was no answer at all. */
export class Refusal extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }

  /** Whether the same request would be refused again. */
  get isFinal() {
    return this.status === 501 || (this.status >= 400 && this.status < 500 && ![401, 408, 429, 499].includes(this.status));
  }

  get text() {
    const again = this.retryAfter ? ` Try again in ${this.retryAfter} s.` : "";
    return `${this.message || `The server answered ${this.status}.`}${again}`;
  }
}

export const isAbort = (error) => error?.name === "AbortError";

export class Server {
  #token;

  constructor(token) {
    this.#token = token;
  }

  /** Ask for a token, for this reason; resolves to whether there is a new one. */
  authorise(reason) {
    return this.#token.ask(reason);
  }

  get hasToken() {
    return this.#token.text !== "";
  }

  /**
   * Ask and return the answer read as JSON. With `isQuiet` nobody is asked for a token. Throws Refusal, or AbortError where
   * `signal` says so.
   */
  async ask(path, options = {}) {
    const response = await this.#send(path, options);
    try {
      return await response.json();
    } catch (error) {
      throw isAbort(error) ? error : new Refusal(0, "The connection ended before the answer was whole.");
    }
  }

  /** Ask and yield the events of a stream as they come. Throws as `ask`. */
  async *events(path, options = {}) {
    const response = await this.#send(path, options);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      while (true) {
        const { done, value } = await this.#piece(reader);
        if (done) return;
        rest += value;
        const whole = rest.split("\n\n");
        rest = whole.pop();
        for (const one of whole) {
          const { name, data } = fields(one);
          if (name === "error") throw refusal(0, data);
          if (data) yield JSON.parse(data);
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  async #piece(reader) {
    try {
      return await reader.read();
    } catch (error) {
      throw isAbort(error) ? error : new Refusal(0, "The connection to the server was lost.");
    }
  }

  async #send(path, { body, method = body ? "POST" : "GET", signal, isQuiet = false } = {}) {
    while (true) {
      const headers = { Accept: "application/json, text/event-stream" };
      const used = this.#token.text;
      if (used) headers.Authorization = `Bearer ${used}`;
      if (body) headers["Content-Type"] = "application/json";
      let response;
      try {
        response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
      } catch (error) {
        throw isAbort(error) ? error : new Refusal(0, "The server cannot be reached.");
      }
      if (response.ok) return response;
      const refused = refusal(response.status, await response.text().catch(() => ""), response.headers.get("Retry-After"));
      if (response.status !== 401 || isQuiet) throw refused;
      if (used === this.#token.text && !(await this.#token.ask(refused.message))) throw refused;
      signal?.throwIfAborted();
    }
  }
}

function fields(event) {
  const told = { name: "", data: "" };
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) told.name = line.slice(7);
    else if (line.startsWith("data: ")) told.data += line.slice(6);
  }
  return told;
}

function refusal(status, body, retryAfter = null) {
  try {
    const told = JSON.parse(body);
    return new Refusal(status || (FINAL.includes(told.code) ? 400 : 0), String(told.message ?? told.error ?? ""), retryAfter);
  } catch {
    return new Refusal(status, `The server answered ${status}.`, retryAfter);
  }
}

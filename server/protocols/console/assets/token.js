// A caller's or an operator's token: asked for only when the server wants one, kept in this tab's session.
import { find, tell } from "./element.js";

let current = null;

export class Token {
  #key;
  #title;
  #asked = null;
  #answer = null;

  /** `key` is where the session keeps it, `title` what it is called. */
  constructor(key, title) {
    this.#key = key;
    this.#title = title;
    find("token").addEventListener("submit", (event) => {
      event.preventDefault();
      if (current !== this) return;
      sessionStorage.setItem(key, find("token-text").value.trim());
      this.#close(true);
    });
    find("token-away").addEventListener("click", () => current === this && this.#close(false));
  }

  get text() {
    return sessionStorage.getItem(this.#key) || "";
  }

  /** Show the field with the server's reason; resolves to whether there is a new token. */
  ask(reason) {
    if (current && current !== this) current.#close(false);
    tell(find("token-title"), this.#title);
    tell(find("token-reason"), reason);
    if (this.#asked === null) {
      current = this;
      find("token").hidden = false;
      find("token-text").value = "";
      find("token-text").focus();
      this.#asked = new Promise((answer) => { this.#answer = answer; });
    }
    return this.#asked;
  }

  #close(isGiven) {
    current = null;
    find("token").hidden = true;
    find("token-text").value = "";
    this.#asked = null;
    this.#answer?.(isGiven);
  }
}

// The caller's token: asked for only when the server wants one, kept in this tab's session.
import { find, tell } from "./element.js";

const KEY = "dragoman-token";

export class Token {
  #asked = null;
  #answer = null;

  constructor() {
    find("token").addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, find("token-text").value.trim());
      this.#close(true);
    });
    find("token-away").addEventListener("click", () => this.#close(false));
  }

  get text() {
    return sessionStorage.getItem(KEY) || "";
  }

  /** Show the field with the server's reason; resolves to whether there is a new token. */
  ask(reason) {
    tell(find("token-reason"), reason);
    if (this.#asked === null) {
      find("token").hidden = false;
      find("token-text").value = "";
      find("token-text").focus();
      this.#asked = new Promise((answer) => { this.#answer = answer; });
    }
    return this.#asked;
  }

  #close(isGiven) {
    find("token").hidden = true;
    find("token-text").value = "";
    this.#asked = null;
    this.#answer?.(isGiven);
  }
}

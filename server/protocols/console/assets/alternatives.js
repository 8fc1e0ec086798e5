// What else could stand at a place of an answer: a menu of the likeliest, each with its probability.
import { element, percent } from "./element.js";
import { isAbort } from "./server.js";
import { words } from "./words.js";

const MOST = 8;
const NEW_TOKENS = 12;

export class Alternatives {
  #server;
  #menu = null;
  #opener = null;
  #close = () => {};

  constructor(server) {
    this.#server = server;
    addEventListener("keydown", (event) => { if (event.key === "Escape") this.close(); });
    addEventListener("click", (event) => { if (this.#menu && event.target !== this.#opener && !this.#menu.contains(event.target)) this.close(false); });
  }

  /**
   * Offer what could stand after `prefix` in place of `button`'s word; `choose(text, isEnd)` gets the answer's new beginning.
   * Not awaited by anybody: what goes wrong is said in the menu.
   */
  async open({ request, prefix, present, width, button, choose }) {
    this.close(false);
    const leaving = new AbortController();
    const menu = element("div", { class: "menu", role: "menu", tabindex: "-1", "aria-label": `Instead of ${button.textContent}` },
      element("p", { class: "note", role: "presentation" }, "Loading…"));
    this.#menu = menu;
    this.#opener = button;
    this.#close = (isBack) => {
      leaving.abort();
      menu.remove();
      button.removeAttribute("aria-expanded");
      if (isBack) button.focus();
    };
    menu.addEventListener("keydown", key);
    button.setAttribute("aria-expanded", "true");
    const room = button.closest(".answer").parentElement;
    room.append(menu);
    place(menu, button, room);
    menu.focus({ preventScroll: true });
    const { model, text, sourceLanguage, targetLanguage, truncate } = request;
    const wanted = { model, text, sourceLanguage, targetLanguage, truncate, forcedPrefix: prefix, returnAlternatives: true,
      numReturnSequences: Math.max(1, Math.min(MOST, width)), maxNewTokens: NEW_TOKENS, returnLogProbs: true };
    try {
      const { answers } = await this.#server.ask("/v1/generate", { body: wanted, signal: leaving.signal });
      const items = offers(answers, prefix).map((offer) => item(offer, present, () => {
        this.close(false);
        choose(offer.beginning, offer.isEnd);
      }));
      menu.replaceChildren(...items);
      place(menu, button, room);
      menu.querySelector("button")?.focus({ preventScroll: true });
    } catch (error) {
      if (!isAbort(error)) menu.replaceChildren(element("p", { class: "note", role: "alert" }, error.text ?? String(error)));
    }
  }

  /** Take the menu away, and go back to the word. */
  close(isBack = true) {
    if (!this.#menu) return;
    this.#menu = null;
    this.#close(isBack);
  }
}

/** Return each beginning that the answers offer, once: prefix and one word more, or the end. */
function offers(answers, prefix) {
  const found = new Map();
  for (const { text, logProbs, finishReason } of answers) {
    const rest = text.startsWith(prefix) ? text.slice(prefix.length) : text;
    const [first, second] = words(rest);
    const isWhole = second !== undefined || finishReason === "FINISH_REASON_EOS";
    const end = text.length - rest.length + (first ? first[1] : 0);
    const beginning = isWhole ? text.slice(0, end) : text;
    if (!found.has(beginning)) {
      const share = logProbs.length ? Math.exp(logProbs[0].logProb) : null;
      found.set(beginning, { beginning, word: text.slice(text.length - rest.length, beginning.length).trim(), more: text.slice(beginning.length),
        share, isEnd: !first });
    }
  }
  return [...found.values()];
}

function item({ word, more, share, isEnd, beginning }, present, choose) {
  return element("button", { type: "button", role: "menuitem", tabindex: "-1", class: beginning === present ? "present" : null, on: { click: choose } },
    element("span", { class: "offer", dir: "auto" }, isEnd ? "end here" : word),
    element("span", { class: "more", dir: "auto" }, more), element("span", { class: "share" }, share === null ? "" : percent(share)));
}

function key(event) {
  const all = [...event.currentTarget.querySelectorAll("button")];
  const steps = { ArrowDown: 1, ArrowUp: -1 };
  if (event.key in steps && all.length) all.at((all.indexOf(document.activeElement) + steps[event.key] + all.length) % all.length).focus();
  else if (event.key === "Home") all.at(0)?.focus();
  else if (event.key === "End") all.at(-1)?.focus();
  else return;
  event.preventDefault();
}

function place(menu, button, room) {
  const around = room.getBoundingClientRect(), at = [...button.getClientRects()].at(-1);
  const left = Math.max(0, Math.min(at.left - around.left, around.width - menu.offsetWidth));
  menu.style.setProperty("left", `${left}px`);
  menu.style.setProperty("top", `${at.bottom - around.top + 6}px`);
}

// One answer: its text while it comes, then its words, each of which can be looked at and exchanged.
import { element, tell } from "./element.js";
import { words } from "./words.js";

export class Answer {
  #room;
  #onWord;
  #buttons = [];
  #attention = null;
  #source;
  #looks;

  /** Show nothing yet, and leave what is shown; `onWord(start, end, button)` is called with the word that somebody wants another for. */
  constructor(room, onWord) {
    this.#room = room;
    this.#onWord = onWord;
  }

  /** Show text that is not all there yet; what it was forced to begin with comes first. */
  write(text) {
    if (!this.writing) {
      this.writing = element("p", { class: "answer writing", dir: "auto" });
      this.#room.replaceChildren(this.writing);
    }
    this.writing.append(text);
  }

  /** Show a whole answer, of which `kept` characters were chosen. */
  finish(text, kept) {
    const line = element("p", { class: "answer", dir: "auto", role: "group", "aria-label": "Answer, word by word" });
    let end = 0;
    this.#buttons = words(text).map(([from, to], i) => {
      line.append(text.slice(end, from));
      end = to;
      const button = element("span", { class: to <= kept ? "word kept" : "word", role: "button", tabindex: i ? "-1" : "0",
        "aria-haspopup": "menu", "aria-describedby": "looks" }, text.slice(from, to));
      line.append(button);
      button.addEventListener("click", () => this.#onWord(from, to, button));
      button.addEventListener("keydown", (event) => this.#key(event, i));
      button.addEventListener("focus", () => this.#look(i));
      button.addEventListener("mouseenter", () => this.#look(i));
      return button;
    });
    line.append(text.slice(end));
    if (!text) line.append(element("span", { class: "note" }, "(the empty answer)"));
    line.addEventListener("mouseleave", () => this.#look(-1));
    this.#source = element("p", { class: "source", dir: "auto" });
    this.#looks = element("p", { class: "note", id: "looks" }, this.#buttons.length ? "Select a word for alternatives." : "");
    this.writing = null;
    this.#room.replaceChildren(line, this.#source, this.#looks);
  }

  /** Show what words look at, from now on. */
  attend(attention) {
    this.#attention = attention;
    const { source } = attention;
    let end = source.length - source.trimStart().length;
    this.#source.replaceChildren();
    for (const [from, to] of attention.sourceWords) {
      this.#source.append(source.slice(end, from), element("span", {}, source.slice(from, to)));
      end = to;
    }
    this.#source.append(source.slice(end).trimEnd());
    this.#look(this.#buttons.indexOf(document.activeElement));
  }

  /** Put the keyboard's focus on the last word that was chosen. */
  focusOnKept() {
    this.#move(this.#buttons.findLastIndex((button) => button.classList.contains("kept")));
  }

  #key(event, i) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key in steps) this.#move(Math.max(0, Math.min(this.#buttons.length - 1, i + steps[event.key])));
    else if (event.key === "Home") this.#move(0);
    else if (event.key === "End") this.#move(this.#buttons.length - 1);
    else if (event.key === "Enter" || event.key === " ") this.#buttons[i].click();
    else return;
    event.preventDefault();
  }

  #move(i) {
    for (const button of this.#buttons) button.tabIndex = -1;
    if (!this.#buttons[i]) return;
    this.#buttons[i].tabIndex = 0;
    this.#buttons[i].focus();
  }

  #look(i) {
    if (!this.#attention?.isPlaced) return;
    const row = i < 0 ? null : this.#attention.rows[i];
    [...this.#source.children].forEach((span, j) => {
      const weight = row ? row[j] : 0;
      span.style.setProperty("--weight", weight.toFixed(3));
      span.classList.toggle("seen", weight >= 0.05);
    });
    this.#buttons.forEach((button, j) => button.classList.toggle("looked", j === i));
    if (row) tell(this.#looks, `“${this.#buttons[i].textContent}” attends to ${this.#attention.summary(i)}.`);
  }
}

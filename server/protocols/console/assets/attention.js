// What the words of an answer look at: encoder-decoder attention, summed from tokens to words, and its table.
import { element, percent } from "./element.js";
import { join, wordOf, words } from "./words.js";

const MAX_WORDS = 40;

export class Attention {
  /** Read the attention that a ScoreResponse tells; `answer` is what was scored. */
  constructor(scored, answer) {
    const { weights, numSourceTokens, sourcePieces } = scored.alignment;
    const source = join(sourcePieces), target = join(scored.tokens.map((token) => token.piece));
    this.source = source.text;
    this.sourceWords = words(source.text);
    this.answerWords = words(answer);
    const columns = wordOf(source.spans, source.text, this.sourceWords);
    // A tokeniser may give the answer's text a space at its beginning, which it takes away again.
    const shift = target.text.length - target.text.trimStart().length - (answer.length - answer.trimStart().length);
    const rows = target.text.trim() === answer.trim()
      ? wordOf(target.spans, target.text, this.answerWords.map(([start, end]) => [start + shift, end + shift]))
      : target.spans.map(() => -1);
    // One more column: what is on tokens that stand for no word, such as end-of-sequence.
    this.rows = this.answerWords.map(() => new Float64Array(this.sourceWords.length + 1));
    const counts = this.answerWords.map(() => 0);
    rows.forEach((word, i) => {
      if (word < 0) return;
      counts[word]++;
      columns.forEach((column, j) => {
        this.rows[word][column < 0 ? this.sourceWords.length : column] += weights[i * numSourceTokens + j];
      });
    });
    this.rows.forEach((row, word) => counts[word] && row.forEach((_, j) => { row[j] /= counts[word]; }));
    this.isPlaced = counts.some((count) => count > 0);
  }

  /** Name the source words that a word of the answer looks at most. */
  summary(word) {
    const best = [...this.sourceWords.keys()].sort((a, b) => this.rows[word][b] - this.rows[word][a]).slice(0, 3);
    const told = best.filter((j) => this.rows[word][j] >= 0.05).map((j) => `${this.#source(j)} ${percent(this.rows[word][j])}`);
    return told.length ? told.join(", ") : "no word in particular";
  }

  #source(j) {
    return this.source.slice(...this.sourceWords[j]);
  }

  /** Return the table, and what to say where it is not all of it. */
  table(answer) {
    const down = this.answerWords.slice(0, MAX_WORDS), across = this.sourceWords.slice(0, MAX_WORDS);
    const head = across.map((_, j) => element("th", { scope: "col", dir: "auto" }, element("span", {}, this.#source(j))));
    const body = down.map((span, i) => element("tr", {}, element("th", { scope: "row", dir: "auto" }, answer.slice(...span)),
      ...[...across.keys(), this.sourceWords.length].map((j) => cell(this.rows[i][j]))));
    return element("div", {}, element("p", { class: "note" }, "Rows are words of the answer, columns words of the source; a row adds up to 100."
      + (down.length < this.answerWords.length || across.length < this.sourceWords.length ? ` The first ${MAX_WORDS} of each.` : "")),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Attention, a table" },
      element("table", { class: "heat" },
        element("thead", {}, element("tr", {}, element("td"), ...head, element("th", { scope: "col" }, element("span", {}, "(no word)")))),
        element("tbody", {}, ...body))));
  }
}

function cell(weight) {
  return element("td", { class: weight >= 0.5 ? "most" : null, style: { "--weight": weight.toFixed(3) } }, weight >= 0.005 ? (weight * 100).toFixed(0) : "");
}

// The Try view: a request is sent, its answer watched, looked into and changed.
import { Alternatives } from "./alternatives.js";
import { Answer } from "./answer.js";
import { Attention } from "./attention.js";
import { Calls } from "./calls.js";
import { copy, element, find, seconds, tell } from "./element.js";
import { Options } from "./options.js";
import { isAbort } from "./server.js";
import { tokenList } from "./tokens.js";

const REASONS = { FINISH_REASON_EOS: "ended by the model", FINISH_REASON_LENGTH: "stopped at its max new tokens" };

export class Try {
  #server;
  #alternatives;
  #options;
  #calls;
  #answer;
  #running = null;
  #asking = null;

  constructor(server) {
    this.#server = server;
    this.#alternatives = new Alternatives(server);
    this.#calls = new Calls(find("calls"));
    this.#options = new Options(() => this.#showCalls());
    find("request").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run(this.#options.request);
    });
    find("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("request").requestSubmit();
    });
    find("copy").addEventListener("click", () => copy(find("answer").querySelector(".answer"), find("copy")));
    find("cancel").addEventListener("click", () => this.#running?.abort());
  }

  /** Ask which models there are, unless all of them are known to be ready. */
  async show() {
    if (this.#options.isReady || this.#asking) return;
    this.#asking = this.#offer();
    await this.#asking;
    this.#asking = null;
  }

  async #offer() {
    this.#problem(null);
    try {
      const { models } = await this.#server.ask("/v1/models");
      this.#options.offer(models);
      find("go").disabled = models.length === 0;
      if (!models.length) this.#problem(new Error("The server has no models."));
    } catch (error) {
      find("go").disabled = true;
      this.#problem(error, error.isFinal ? null : () => this.show());
    }
  }

  hide() {
    this.#alternatives.close(false);
  }

  /** Send a request and show its answer; what ran before is cancelled, and the answer before stays until this one begins. */
  async run(request) {
    const before = this.#running ? "" : find("status").textContent;
    this.#running?.abort();
    this.#alternatives.close(false);
    const running = new AbortController();
    this.#running = running;
    this.#problem(null);
    this.#busy(true);
    const answer = new Answer(find("answer"), (...place) => this.#offerWords(request, ...place));
    this.#showCalls(request);
    tell(find("status"), "Waiting for the first words…");
    find("result").scrollIntoView({ block: "nearest" });
    let result = null, text = "";
    try {
      for await (const piece of this.#server.events("/v1/generate:stream", { body: request, signal: running.signal })) {
        if (this.#answer !== answer) find("details").replaceChildren();
        this.#answer = answer;
        answer.write(piece.text);
        text += piece.text;
        find("copy").hidden = !text;
        tell(find("status"), "Writing…");
        if (piece.result) result = piece.result;
      }
      if (!result) throw new Error("The connection ended before the answer was whole.");
    } catch (error) {
      if (this.#running !== running) return;
      this.#end(running);
      tell(find("status"), isAbort(error) ? (text ? "Cancelled; this is the text so far." : "Cancelled.") : text ? "" : before);
      if (!isAbort(error)) this.#problem(error, error.isFinal ? null : () => this.run(request));
      return;
    }
    if (this.#running !== running) return;
    this.#end(running);
    this.#finish(request, result);
  }

  #finish(request, result) {
    const { answers } = result;
    const warnings = (result.warnings ?? []).map((warning) => `. Warning: ${warning.replace(/^text: /, "the text ")}`);
    const cut = (result.isTruncated ? ", the text was cut" : "") + warnings.join("");
    tell(find("status"), `${result.model} ${result.modelVersion}: ${result.usage.sourceTokens} tokens read, ${result.usage.generatedTokens} written in `
      + `${seconds(result.timings.totalSeconds)}, first token after ${seconds(result.timings.timeToFirstTokenSeconds)}${cut}.`);
    const best = element("div", { class: "answers" });
    if (answers.length > 1) {
      const list = element("ol", {}, ...answers.map((answer) => this.#choice(request, answer)));
      list.firstElementChild.firstElementChild.setAttribute("aria-pressed", "true");
      best.append(element("h2", {}, "All answers"), list);
    }
    const { segments = [] } = result;
    const isDivided = segments.length > 1 || request.markup || request.keepPlaceholders;
    if (segments.length > 1) best.append(segmentTable(request.text, answers[0].text, segments));
    find("details").replaceChildren(best, element("div", { id: "looks-into" }));
    if (isDivided) this.#showWhole(answers[0].text);
    else this.#look(request, answers[0]);
  }

  /** Show an answer of several parts, of whose words none has alternatives or attention. */
  #showWhole(text) {
    find("answer").replaceChildren(element("p", { class: "answer", dir: "auto" }, text || "(the empty answer)"));
    find("copy").hidden = !text;
  }

  #choice(request, answer) {
    const button = element("button", { type: "button", class: "choice", "aria-pressed": "false" },
      element("span", { class: "offer", dir: "auto" }, answer.text || "(the empty answer)"),
      element("span", { class: "share" }, `score ${answer.score.toFixed(3)}, ${REASONS[answer.finishReason] ?? ""}`));
    button.addEventListener("click", () => {
      for (const other of button.closest("ol").querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
      if (find("segments") || request.markup || request.keepPlaceholders) this.#showWhole(answer.text);
      else this.#look(request, answer);
    });
    return element("li", {}, button);
  }

  /** Show an answer's words, and ask what its tokens are worth and what they look at. */
  async #look(request, answer) {
    const shown = this.#answer, { text } = answer;
    const kept = text.startsWith(request.forcedPrefix ?? "") ? (request.forcedPrefix ?? "").length : 0;
    this.#scoring?.abort();
    this.#scoring = new AbortController();
    const { signal } = this.#scoring;
    shown.finish(text, kept);
    find("copy").hidden = !text;
    if (kept) shown.focusOnKept();
    const room = find("looks-into");
    const wanted = { model: request.model, text: request.text, target: text, sourceLanguage: request.sourceLanguage, targetLanguage: request.targetLanguage };
    room.replaceChildren(element("p", { class: "note" }, "Scoring…"));
    try {
      const { scored, refused } = await this.#score(wanted, signal);
      const parts = [element("details", { class: "part", open: true }, element("summary", {}, "Token probabilities"), tokenList(scored))];
      if (scored.alignment?.numSourceTokens) {
        const attention = new Attention(scored, text);
        shown.attend(attention);
        parts.unshift(element("details", { class: "part", open: true }, element("summary", {}, "Attention"), attention.isPlaced
          ? attention.table(text) : element("p", { class: "note" }, "The tokeniser changes the text of this answer, so its words have no attention of their own.")));
      } else {
        parts.push(element("p", { class: "note", id: "no-attention" }, refused));
      }
      room.replaceChildren(...parts);
    } catch (error) {
      if (!isAbort(error)) room.replaceChildren(element("p", { class: "note" }, `Tokens and attention are not available: ${error.text ?? error.message}`));
    }
  }

  #scoring = null;

  /** Score an answer, with attention where the model has any; `refused` says why it has not. */
  async #score(wanted, signal) {
    let refused = "A language model has no source to attend to.";
    if (!this.#options.isContinuing) {
      try {
        return { scored: await this.#server.ask("/v1/score", { body: { ...wanted, returnAlignment: true }, signal }), refused: "" };
      } catch (error) {
        if (![400, 501].includes(error.status)) throw error;
        refused = `No attention: ${error.text}`;
      }
    }
    return { scored: await this.#server.ask("/v1/score", { body: wanted, signal }), refused };
  }

  #offerWords(request, from, to, button) {
    const text = button.closest(".answer").textContent;
    const prefix = text.slice(0, from).trimEnd();
    const model = this.#options.model;
    this.#alternatives.open({
      request, prefix, button, present: text.slice(0, to), width: model?.maxSlotsPerRequest || model?.maxSlots || 1,
      choose: (beginning, isEnd) => {
        if (isEnd) this.#look({ ...request, forcedPrefix: prefix }, { text: prefix });
        else this.run({ ...request, forcedPrefix: beginning });
      },
    });
  }

  #showCalls(request = this.#options?.request) {
    if (request) this.#calls.show(request, this.#server.hasToken);
  }

  #busy(isBusy) {
    find("cancel").hidden = !isBusy;
    find("result").setAttribute("aria-busy", String(isBusy));
  }

  #end(running) {
    if (this.#running === running) this.#running = null;
    this.#busy(false);
  }

  #problem(error, again = null) {
    const room = find("try-problem");
    room.hidden = error === null;
    room.replaceChildren();
    if (error === null) return;
    room.append(error.text ?? error.message);
    if (again) room.append(" ", element("button", { type: "button", on: { click: again } }, "Try again"));
  }
}

/** Return a table of the segments of a text, of which places are in code points. */
function segmentTable(source, target, segments) {
  const [from, to] = [[...source], [...target]];
  const rows = segments.map(({ sourceStart = 0, sourceEnd, targetStart = 0, targetEnd, score = 0, isCut }) => element("tr", {},
    element("td", { dir: "auto" }, from.slice(sourceStart, sourceEnd).join("") + (isCut ? " (cut)" : "")),
    element("td", { dir: "auto" }, to.slice(targetStart, targetEnd).join("")),
    element("td", {}, score.toFixed(3))));
  const head = element("tr", {}, ...["Text", "Answer", "Score"].map((title) => element("th", { scope: "col" }, title)));
  return element("details", { class: "part", id: "segments", open: true }, element("summary", {}, `${segments.length} segments`),
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

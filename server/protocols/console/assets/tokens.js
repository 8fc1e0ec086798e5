// The tokens of an answer and how likely the model finds each: as colour and as numbers.
import { element, percent } from "./element.js";
import { bytes } from "./words.js";

const MAX_TOKENS = 512;

/** Return the list of what a ScoreResponse tells of tokens. */
export function tokenList(scored) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const items = scored.tokens.slice(0, MAX_TOKENS).map(({ token, piece, logProb }) => {
    const found = bytes(piece);
    const text = decoder.decode(found).replace(/\n/gu, "↵");
    const share = Math.exp(logProb);
    return element("li", { style: { "--weight": (1 - share).toFixed(3) }, title: `token ${token}, log-probability ${logProb.toFixed(3)}` },
      element("span", { class: "piece", dir: "auto" }, found.length ? text : "end"),
      element("span", { class: "share" }, `${percent(share)}`), element("span", { class: "share" }, logProb.toFixed(2)));
  });
  const more = scored.tokens.length - items.length;
  return element("div", {}, element("ol", { class: "tokens" }, ...items), more > 0 ? element("p", { class: "note" }, `${more} more.`) : null);
}

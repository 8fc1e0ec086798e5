// Words of a text, and where in it the pieces of tokens lie.

// Written without spaces between words.
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]/u;
const PARTS = /^([\p{P}\p{S}]*)(.*?)([\p{P}\p{S}]*)$/su;

/** Return words and marks as [start, end) of a text, in order; spaces belong to none. */
export function words(text) {
  const found = [];
  const add = (start, part) => part && found.push([start, start + part.length]);
  for (const { 0: run, index } of text.matchAll(/\S+/gu)) {
    if (UNSPACED.test(run) && Intl.Segmenter) {
      for (const one of new Intl.Segmenter(undefined, { granularity: "word" }).segment(run)) add(index + one.index, one.segment);
    } else {
      const [, before, middle, after] = PARTS.exec(run);
      add(index, before);
      add(index + before.length, middle);
      add(index + before.length + middle.length, after);
    }
  }
  return found;
}

/** Return a piece, base64 in JSON, as bytes. */
export const bytes = (piece) => Uint8Array.from(atob(piece), (one) => one.charCodeAt(0));

/** Join pieces that may each end inside a character: their text, and [start, end) of each in it. */
export function join(pieces) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const spans = [];
  let text = "";
  for (const piece of pieces) {
    const start = text.length;
    text += decoder.decode(bytes(piece), { stream: true });
    spans.push([start, text.length]);
  }
  return { text: text + decoder.decode(), spans };
}

/** Return for each span the word that its first character which is no space lies in, -1 for none. */
export function wordOf(spans, text, found) {
  let word = 0;
  return spans.map(([start, end]) => {
    const first = start + (text.slice(start, end).match(/^\s*/u)[0].length);
    if (first >= end) return -1;
    while (word < found.length && found[word][1] <= first) word++;
    return word < found.length && found[word][0] <= first ? word : -1;
  });
}

// A model's card, Markdown: what cards have of it, as elements. HTML in it is text, links lead to the web alone,
// and of pictures there is what they are called.
import { element } from "./element.js";

const BLOCK = /^(#{1,6}\s|```|\s*([-*+]|\d+[.)])\s+|\|)/u;
const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|!?\[([^\]\n]+)\]\(([^()\s]+)\)/gu;
const MAX_LINES = 4000;

/** Return a card's elements; the settings at its head (YAML between `---`) are left out. */
export function markdown(text) {
  const lines = text.replace(/\r\n?/gu, "\n").replace(/^---\n[^]*?\n---(\n|$)/u, "").split("\n").slice(0, MAX_LINES);
  const room = element("div", { class: "card" });
  for (let i = 0; i < lines.length;) {
    const from = i;
    const until = (isEnd) => {
      while (i < lines.length && !isEnd(lines[i])) i++;
      return lines.slice(from, i);
    };
    if (!lines[i].trim()) i++;
    else if (lines[i].startsWith("```")) {
      i++;
      const code = until((line) => line.startsWith("```")).slice(1);
      i++;
      room.append(element("pre", { tabindex: "0" }, code.join("\n")));
    } else if (/^#{1,6}\s/u.test(lines[i])) {
      const [, marks, title] = /^(#+)\s+(.*?)\s*#*$/u.exec(lines[i++]);
      room.append(element(marks.length === 1 ? "h3" : marks.length === 2 ? "h4" : "h5", {}, ...inline(title)));
    } else if (lines[i].startsWith("|")) {
      room.append(table(until((line) => !line.startsWith("|"))));
    } else if (/^\s*([-*+]|\d+[.)])\s/u.test(lines[i])) {
      room.append(list(until((line) => !line.trim())));
    } else {
      i++;
      room.append(element("p", {}, ...inline(until((line) => !line.trim() || BLOCK.test(line)).join(" "))));
    }
  }
  return room;
}

function list(lines) {
  const items = [];
  for (const line of lines) {
    const item = /^\s*(?:[-*+]|\d+[.)])\s+(.*)/u.exec(line);
    if (item) items.push(item[1]);
    else items[items.length - 1] += ` ${line.trim()}`;
  }
  return element(/^\s*\d/u.test(lines[0]) ? "ol" : "ul", {}, ...items.map((item) => element("li", {}, ...inline(item))));
}

function table(lines) {
  const rows = lines.filter((line) => !/^[|\s:-]+$/u.test(line)).map((line) => line.replace(/^\||\|\s*$/gu, "").split("|").map((cell) => cell.trim()));
  const [head = [], ...body] = rows;
  const first = head.map((cell) => element(cell ? "th" : "td", cell ? { scope: "col" } : {}, ...inline(cell)));
  return element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" }, element("table", {}, element("thead", {}, element("tr", {}, ...first)),
    element("tbody", {}, ...body.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, ...inline(cell))))))));
}

function* inline(text) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    yield text.slice(end, found.index);
    end = found.index + found[0].length;
    const [, code, strong, title, address] = found;
    if (code) yield element("code", {}, code);
    else if (strong) yield element("strong", {}, strong);
    else if (/^https?:\/\//u.test(address)) yield element("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, title);
    else yield title;
  }
  yield text.slice(end);
}

// A figure and how it went lately, as a small line.
import { element, tell } from "./element.js";

const LENGTH = 120, WIDTH = 120, HEIGHT = 28;
const SVG = "http://www.w3.org/2000/svg";

export class Trend {
  #values = [];
  #figure = element("dd");
  #line = document.createElementNS(SVG, "polyline");

  constructor(title) {
    const drawing = document.createElementNS(SVG, "svg");
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" })) drawing.setAttribute(key, value);
    drawing.append(this.#line);
    this.room = element("div", { class: "trend" }, element("dt", {}, title), this.#figure, drawing);
  }

  /** Add a value, null where there is none now, and what it is called. */
  add(value, text) {
    tell(this.#figure, text);
    this.#values.push(value ?? 0);
    if (this.#values.length > LENGTH) this.#values.shift();
    const most = Math.max(...this.#values, 1e-9), first = LENGTH - this.#values.length;
    this.#line.setAttribute("points", this.#values.map((one, i) =>
      `${((first + i) * WIDTH / (LENGTH - 1)).toFixed(1)},${(HEIGHT - 1 - one / most * (HEIGHT - 3)).toFixed(1)}`).join(" "));
  }
}

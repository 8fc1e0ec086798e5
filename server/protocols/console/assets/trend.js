// A figure and its last half minute as a small line, with the largest value for a scale.
import { element, tell } from "./element.js";

const LENGTH = 120, WIDTH = 120, HEIGHT = 28;
const SVG = "http://www.w3.org/2000/svg";

export class Trend {
  #values = [];
  #figure = element("dd");
  #scale = element("dd", { class: "scale" });
  #format;
  #line = document.createElementNS(SVG, "polyline");

  constructor(title, format) {
    this.#format = format;
    const drawing = document.createElementNS(SVG, "svg");
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" })) drawing.setAttribute(key, value);
    drawing.append(this.#line);
    this.room = element("div", { class: "trend" }, element("dt", {}, title), this.#figure, drawing, this.#scale);
  }

  /** Add a value, null where there is none now. */
  add(value) {
    tell(this.#figure, value === null ? "–" : this.#format(value));
    this.#values.push(value ?? 0);
    if (this.#values.length > LENGTH) this.#values.shift();
    const most = Math.max(...this.#values), first = LENGTH - this.#values.length;
    tell(this.#scale, `max ${this.#format(most)} in 30 s`);
    this.#line.setAttribute("points", this.#values.map((one, i) =>
      `${((first + i) * WIDTH / (LENGTH - 1)).toFixed(1)},${(HEIGHT - 1 - one / (most || 1) * (HEIGHT - 3)).toFixed(1)}`).join(" "));
  }
}

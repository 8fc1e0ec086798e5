// The slots of an engine as a grid: a request has a colour, and fills its slot as its answer grows. Cells are made once and changed.
import { element } from "./element.js";

export class Slots {
  #cells = [];
  #shown = [];

  constructor() {
    this.room = element("div", { class: "slots", role: "img" });
  }

  /** Show the slots of engines that share them evenly; each numbers its own, and its requests. */
  show({ numSlots, numEngines, slots }) {
    if (this.#cells.length !== numSlots) {
      this.#cells = Array.from({ length: numSlots }, () => element("i", { class: "slot" }));
      this.#shown = this.#cells.map(() => "");
      this.room.replaceChildren(...this.#cells);
      this.room.style.setProperty("--side", numSlots > 256 ? "0.75rem" : numSlots > 64 ? "1rem" : numSlots > 16 ? "1.25rem" : "1.5rem");
    }
    const now = new Array(numSlots).fill(null);
    const perEngine = Math.ceil(numSlots / Math.max(1, numEngines));
    for (const slot of slots) {
      const place = slot.engine * perEngine + slot.slot;
      if (place < numSlots) now[place] = slot;
    }
    now.forEach((slot, i) => this.#set(i, slot));
    const requests = new Set(slots.map((slot) => `${slot.engine} ${slot.request}`)).size;
    this.room.hidden = numSlots === 0;
    this.room.setAttribute("aria-label", `${slots.length} of ${numSlots} slots are in use, by ${requests} ${requests === 1 ? "request" : "requests"}`);
  }

  #set(i, slot) {
    const filled = slot ? Math.ceil(20 * Math.min(1, slot.numTokens / Math.max(1, slot.maxNewTokens))) : 0;
    const key = slot ? `${slot.engine} ${slot.request} ${slot.state} ${slot.numTokens} ${filled}` : "";
    if (this.#shown[i] === key) return;
    const cell = this.#cells[i];
    if (!slot) {
      cell.className = "slot";
      cell.removeAttribute("title");
    } else {
      cell.className = `slot used ${slot.state === "prefill" ? "prefill" : "decode"}`;
      // Steps of the golden angle: neighbours in time are far apart in colour.
      cell.style.setProperty("--hue", `${((slot.request + 7 * slot.engine) * 137.508) % 360}`);
      cell.style.setProperty("--filled", `${filled * 5}%`);
      cell.title = `request ${slot.request}: ${slot.numSourceTokens} tokens read, ${slot.numTokens} of at most ${slot.maxNewTokens} written`;
    }
    this.#shown[i] = key;
  }
}

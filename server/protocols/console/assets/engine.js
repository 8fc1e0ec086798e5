// The Engine view: what each model's engine does now, four times a second while somebody looks.
import { element, find, forget, seconds, size, tell } from "./element.js";
import { isAbort } from "./server.js";
import { Slots } from "./slots.js";
import { Trend } from "./trend.js";

const MAX_CALLERS = 20;
const whole = (value) => value.toFixed(0);
const TRENDS = { tokensPerSecond: ["Tokens per second", whole], stepsPerSecond: ["Steps per second", whole],
  rowsPerStep: ["Rows per step", (value) => value.toFixed(1)], stepSeconds: ["Step time", seconds] };
const LONGEST_PAUSE = 8000;

export class Engine {
  #server;
  #watching = null;
  #panels = new Map();

  constructor(server) {
    this.#server = server;
  }

  show() {
    if (this.#watching) return;
    this.#watching = new AbortController();
    this.#watch(this.#watching.signal);
  }

  hide() {
    this.#watching?.abort();
    this.#watching = null;
  }

  async #watch(signal) {
    let pause = 500;
    while (!signal.aborted) {
      try {
        for await (const told of this.#server.events("/console/engine", { signal })) {
          pause = 500;
          this.#take(told);
        }
        this.#state("away", "The server ended the stream; reconnecting…");
      } catch (error) {
        if (isAbort(error) || signal.aborted) return;
        const isOver = error.isFinal || error.status === 401;
        this.#state("away", `${error.text ?? error.message} ${isOver ? "" : "Reconnecting…"}`);
        if (isOver) return this.hide();
      }
      await new Promise((next) => {
        const timer = setTimeout(next, pause);
        signal.addEventListener("abort", () => { clearTimeout(timer); next(); }, { once: true });
      });
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }

  #state(kind, text) {
    find("engine-state").dataset.kind = kind;
    tell(find("engine-state"), text);
    find("engines").classList.toggle("old", kind === "away");
    if (kind === "away") forget(find("engines"));
  }

  #take(told) {
    if (told.isDraining) this.#state("wait", "Draining: running requests finish, new ones are refused");
    else this.#state(told.isReady ? "ready" : "wait", told.isReady ? "Ready" : "Not ready");
    tell(find("engine-note"), `up ${seconds(told.uptimeSeconds)}`);
    const keys = told.models.map((model) => `${model.name} ${model.version} ${model.label}`);
    for (const [key, panel] of this.#panels) {
      if (!keys.includes(key)) {
        panel.room.remove();
        this.#panels.delete(key);
      }
    }
    told.models.forEach((model, i) => {
      let panel = this.#panels.get(keys[i]);
      if (!panel) {
        panel = new Panel(model);
        this.#panels.set(keys[i], panel);
        find("engines").append(panel.room);
      }
      panel.take(model);
    });
    if (!told.models.length) find("engines").replaceChildren(element("p", { class: "empty" }, "No models are loaded."));
    else find("engines").querySelector(".empty")?.remove();
  }
}

/** One version of a model. */
class Panel {
  #slots = new Slots();
  #figures = new Map();
  #trends = new Map();
  #callers = element("tbody");
  #shownCallers = "";

  constructor(model) {
    const facts = element("dl", { class: "facts" });
    for (const title of ["Slots", "Running", "Waiting", "Cache"]) {
      const figure = element("dd");
      this.#figures.set(title, figure);
      facts.append(element("div", {}, element("dt", {}, title), figure));
    }
    const trends = element("dl", { class: "trends" });
    for (const [key, shown] of Object.entries(TRENDS)) {
      const trend = new Trend(...shown);
      this.#trends.set(key, trend);
      trends.append(trend.room);
    }
    this.#state = element("span", { class: "badge" });
    this.#table = element("table", { class: "callers" }, element("caption", {}, "Callers"), element("thead", {}, element("tr", {},
      ...["Caller", "Running", "Waiting"].map((one) => element("th", { scope: "col" }, one)))), this.#callers);
    this.room = element("article", { class: "panel", "aria-label": `${model.name} ${model.version}` },
      element("h2", {}, model.name, " ", element("code", {}, model.version), " ", this.#state,
        element("span", { class: "note" }, ` ${model.label === model.version ? "" : `${model.label}: `}${model.precision}${model.device ? ` on ${model.device}` : ""}`
          + (model.numEngines > 1 ? `, ${model.numEngines} engines` : "") + (model.isDefault ? "" : ", not the default version"))),
      this.#slots.room, facts, trends, this.#table);
  }

  #state;
  #table;

  take(model) {
    tell(this.#state, model.state);
    this.#state.dataset.kind = ["ready", "running", "serving"].includes(model.state.toLowerCase()) ? "ready" : "wait";
    this.#slots.show(model);
    this.#figure("Slots", `${model.numSlotsInUse} of ${model.numSlots}`);
    this.#figure("Running", `${model.numRunning}`);
    this.#figure("Waiting", model.numWaiting ? `${model.numWaiting} (${model.numWaitingTokens} tokens, ${seconds(model.queueSeconds)})` : "0");
    this.#figure("Cache", `${size(model.cacheBytesUsed)} of ${size(model.cacheBytesReserved)}`);
    for (const [key, trend] of this.#trends) trend.add(model[key]);
    this.#table.hidden = !model.callers.length;
    const callers = JSON.stringify(model.callers.slice(0, MAX_CALLERS));
    if (callers === this.#shownCallers) return;
    this.#shownCallers = callers;
    this.#callers.replaceChildren(...model.callers.slice(0, MAX_CALLERS).map(({ name, numRunning, numWaiting }) => element("tr", {},
      element("th", { scope: "row", dir: "auto" }, name || "(unnamed)"), element("td", {}, `${numRunning}`), element("td", {}, `${numWaiting}`))));
  }

  #figure(title, text) {
    tell(this.#figures.get(title), text);
  }
}

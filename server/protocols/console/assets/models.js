// The Models view: what each model is, by its card and its export, and which of its versions are served.
import { element, find, forget } from "./element.js";
import { Lifecycle } from "./lifecycle.js";
import { markdown } from "./markdown.js";

const MAX_DEPTH = 4, MAX_ITEMS = 200, READ_AGAIN = 5000;
// Of a Model, in this order; what is 0 or empty is not told.
const FACTS = { architecture: "Architecture", precision: "Weights", device: "Device", maxSlots: "Slots" };
const LIMITS = { maxSourceTokens: "Max source tokens", maxTargetTokens: "Max answer tokens", defaultMaxNewTokens: "Default max new tokens",
  maxSlotsPerRequest: "Max slots per request", maxPriority: "Max priority", sourceVocabSize: "Source vocabulary", targetVocabSize: "Target vocabulary",
  shortlistTokens: "Shortlist", cachePrecision: "Cache", weightBits: "Weight bits" };
const PARTS = { quality: "Quality", parity: "Parity with PyTorch", defaults: "Defaults", origin: "Origin" };

export class Models {
  #server;
  #lifecycle;
  #shown = "";

  constructor(server, operators) {
    this.#server = server;
    this.#lifecycle = new Lifecycle(operators, () => this.show());
  }

  hide() {
    clearTimeout(this.#again);
  }

  #again = 0;

  /** Read it, and again from time to time as long as it is shown. */
  async show() {
    clearTimeout(this.#again);
    const isGoingOn = await this.#read();
    clearTimeout(this.#again);
    if (isGoingOn && !find("view-models").hidden && !document.hidden) this.#again = setTimeout(() => this.show(), READ_AGAIN);
  }

  async #read() {
    if (!find("cards").children.length) this.#state("Reading…");
    try {
      const told = await this.#server.ask("/console/models");
      const models = told.models.map(({ model, ...rest }) => ({ ...model, ...rest }));
      await this.#lifecycle.read();
      this.#state(models.length ? "" : "The server has no models.");
      const key = JSON.stringify([models, this.#lifecycle.state]);
      if (key === this.#shown) return true;
      this.#shown = key;
      const open = new Set([...find("cards").querySelectorAll("details[open]")].map((one) => one.dataset.key));
      find("cards").replaceChildren(this.#lifecycle.note(), ...models.map((model) => this.#model(model)),
        ...this.#lifecycle.others(models.map(({ name }) => name)).map((name) => element("article", { class: "panel", "aria-label": name },
          element("h2", {}, name, " ", element("span", { class: "badge" }, "not loaded")), this.#lifecycle.controls({ name }))));
      for (const one of find("cards").querySelectorAll("details")) one.open = open.has(one.dataset.key);
      return true;
    } catch (error) {
      this.#state(error.text ?? error.message, error.isFinal ? null : () => this.show());
      this.#shown = "";
      forget(find("cards"));
      return error.status !== 401 && !error.isFinal;
    }
  }

  #state(text, again = null) {
    const room = find("models-state");
    room.replaceChildren(text);
    if (again) room.append(" ", element("button", { type: "button", on: { click: again } }, "Try again"));
  }

  #model(model) {
    const facts = (titles) => Object.entries(titles).map(([key, title]) => [title, model[key] ?? model.limits?.[key]])
      .filter(([, value]) => value).map(([title, value]) => fact(title, `${value}`));
    const known = facts(FACTS);
    for (const side of ["source", "target"]) {
      const codes = (model[`${side}Languages`] ?? []).map(({ code }) => code);
      if (codes.length) known.push(fact(side === "source" ? "Reads" : "Writes", codes.length > 12 ? `${codes.length} languages: ${codes.join(", ")}` : codes.join(", ")));
    }
    const state = element("span", { class: "badge", "data-kind": model.isReady ? "ready" : "wait" }, model.isReady ? "ready" : model.isAsleep ? "asleep" : "not ready");
    return element("article", { class: "panel", "aria-label": model.name },
      element("h2", {}, model.name, " ", element("code", {}, model.version), " ", state),
      model.domain ? element("p", { class: "note", dir: "auto" }, `Domain: ${model.domain}.`) : null, element("dl", { class: "facts" }, ...known),
      versions(model.versions ?? []), this.#lifecycle.controls(model),
      fold(model, "limits", "Limits and sizes", element("dl", { class: "facts" }, ...facts(LIMITS))),
      ...Object.entries(PARTS).map(([key, title]) => part(model, key, title)),
      model.card ? fold(model, "card", "Card", markdown(model.card)) : element("p", { class: "note" }, "The bundle has no card."));
  }
}

const fact = (title, text) => element("div", {}, element("dt", {}, title), element("dd", { dir: "auto" }, text));

function fold(model, key, title, inside) {
  return element("details", { class: "part", "data-key": `${model.name} ${model.version} ${key}` }, element("summary", {}, title), inside);
}

function part(model, key, title) {
  const value = model[key];
  if (isNothing(value)) return null;
  return fold(model, key, title, describe(value, 0));
}

const isNothing = (value) => [null, undefined, "", false].includes(value) || (typeof value === "object" && Object.values(value).every(isNothing));

/** Show data as it is: objects as terms and what they are, lists as lists. */
function describe(value, depth) {
  if (value === null || typeof value !== "object" || depth >= MAX_DEPTH) return document.createTextNode(plain(value));
  const entries = Object.entries(value).slice(0, MAX_ITEMS);
  if (Array.isArray(value)) {
    if (entries.every(([, one]) => one === null || typeof one !== "object")) return document.createTextNode(entries.map(([, one]) => plain(one)).join(", "));
    return element("ul", {}, ...entries.map(([, one]) => element("li", {}, describe(one, depth + 1))));
  }
  return element("dl", { class: "told" }, ...entries.filter(([, one]) => !isNothing(one)).map(([key, one]) =>
    element("div", {}, element("dt", {}, title(key)), element("dd", { dir: "auto" }, describe(one, depth + 1)))));
}

function plain(value) {
  if (typeof value === "number" && !Number.isInteger(value)) return Math.abs(value) < 0.001 ? value.toExponential(1) : `${+value.toPrecision(4)}`;
  if (typeof value === "boolean") return value ? "yes" : "no";
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}

const title = (key) => {
  const text = key.replaceAll("_", " ").replace(/([a-z])([A-Z])/gu, (_, before, after) => `${before} ${after.toLowerCase()}`)
    .replace(/^num /u, "").replace(/^max /u, "largest ");
  return text[0].toUpperCase() + text.slice(1);
};

function versions(told) {
  if (told.length < 2) return null;
  return element("table", {}, element("caption", {}, "Served versions"), element("thead", {}, element("tr", {},
    ...["Version", "Content", "Labels", "Share"].map((one) => element("th", { scope: "col" }, one)))),
  element("tbody", {}, ...told.map(({ name, version, labels, share, isDefault }) => element("tr", {},
    element("th", { scope: "row" }, name + (isDefault ? " (default)" : "")), element("td", {}, element("code", {}, version)),
    element("td", {}, (labels ?? []).join(", ")), element("td", {}, `${Math.round(100 * share)} %`)))));
}

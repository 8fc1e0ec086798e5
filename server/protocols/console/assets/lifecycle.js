// Loading, reloading and taking back of models: what the server's repository says, and the buttons that change it.
import { element } from "./element.js";

const WHY = {
  401: "Changing models needs an operator's token.",
  403: "This token may not change models.",
  404: "This server does not change models over HTTP.",
};
const VERBS = { reload: "Reload", rollback: "Roll back", unload: "Unload", load: "Load" };

export class Lifecycle {
  #server;
  #onChange;
  #said = "";

  constructor(server, onChange) {
    this.#server = server;
    this.#onChange = onChange;
    this.told = null;
    this.reason = "";
    this.isClosed = false;
  }

  /** Ask what the repository has, where there is hope. A refusal is no error: it says why there are no buttons. */
  async read() {
    if (document.querySelector('meta[name="http-admin"]').content !== "yes") return this.#refuse(404);
    if (!this.#server.hasToken) return this.#refuse(401);
    try {
      this.told = await this.#server.ask("/v1/repository", { isQuiet: true });
      this.reason = "";
      this.isClosed = false;
    } catch (error) {
      this.#refuse(error.status, error.text ?? error.message);
    }
  }

  #refuse(status, reason = "") {
    this.told = null;
    this.isClosed = status === 401 || status === 403;
    this.reason = WHY[status] ?? reason;
  }

  /** All that is shown of it. */
  get state() {
    return [this.told, this.reason, this.#said];
  }

  /** Return the names of models that are in the repository and not among these. */
  others(names) {
    return (this.told?.models ?? []).map(({ name }) => name).filter((name) => !names.includes(name));
  }

  /** Say what has been done, or why nothing can be. */
  note() {
    const give = async () => (await this.#server.authorise(this.reason)) && this.#onChange();
    return element("div", { class: "row wrap" },
      element("p", { class: "note", id: "lifecycle-note", role: "status" }, [this.#said, this.reason, this.told?.problem].filter(Boolean).join(" ")),
      this.isClosed ? element("button", { type: "button", on: { click: give } }, "Enter token") : null);
  }

  /** Return the versions that are in the repository, and what can be done with a model; null where nothing can. */
  controls({ name }) {
    const model = this.told?.models?.find((one) => one.name === name);
    if (!model) return null;
    const loaded = (model.versions ?? []).some(({ state }) => ["VERSION_STATE_SERVING", "VERSION_STATE_TRIAL", "VERSION_STATE_ASLEEP"].includes(state));
    const verbs = loaded ? ["reload", "rollback", "load", "unload"] : ["load"];
    const buttons = verbs.map((verb) => element("button", { type: "button", "aria-label": `${VERBS[verb]} ${name}`,
      on: { click: (event) => this.#do(name, verb, event.currentTarget) } }, VERBS[verb]));
    const rows = (model.versions ?? []).map((one) => element("tr", {}, element("th", { scope: "row" }, one.name || one.version),
      element("td", {}, element("span", { class: "badge" }, (one.state ?? "").replace("VERSION_STATE_", "").toLowerCase())),
      element("td", { dir: "auto" }, [one.cause, one.reason].filter(Boolean).join(": "))));
    return element("div", {}, rows.length ? element("table", {}, element("caption", {}, "In the repository"), element("thead", {}, element("tr", {},
      ...["Version", "State", "Reason"].map((one) => element("th", { scope: "col" }, one)))), element("tbody", {}, ...rows)) : null,
    ...(model.problems ?? []).map((problem) => element("p", { class: "note" }, problem)), element("div", { class: "row wrap" }, ...buttons));
  }

  async #do(name, verb, button) {
    if (verb === "unload" && button.dataset.sure !== "yes") {  // asked for twice: nothing answers for the model afterwards
      button.dataset.sure = "yes";
      button.textContent = "Unload: sure?";
      button.addEventListener("blur", () => { button.dataset.sure = ""; button.textContent = VERBS.unload; }, { once: true });
      return;
    }
    button.disabled = true;
    try {
      await this.#server.ask(`/v1/repository/models/${encodeURIComponent(name)}:${verb}`, { body: {} });
      this.#said = `${name}: ${VERBS[verb].toLowerCase()} was done.`;
    } catch (error) {
      this.#said = `${name}: ${VERBS[verb].toLowerCase()} failed. ${error.text ?? error.message}`;
    }
    this.#onChange();
  }
}

// The form of a request: model, languages, text, and how the answer is to be searched for.
import { element, find, tell } from "./element.js";

const CHOICES = ["split", "markup"];
const FLAGS = { truncate: "truncate", "keep-placeholders": "keepPlaceholders" };
const NUMBERS = { "length-penalty": "lengthPenalty", temperature: "temperature", "top-k": "topK", "top-p": "topP", seed: "seed" };

// Where the tab's session keeps the form, so that a reload leaves it as it is.
const FORM = "dragoman-form";
const kept = () => JSON.parse(sessionStorage.getItem(FORM) ?? "{}");

export class Options {
  #models = [];

  constructor(onChange) {
    find("model").addEventListener("change", () => this.#chosen());
    find("search").addEventListener("change", () => this.#fit());
    const fields = [...find("request").querySelectorAll("input, select, textarea")];
    const values = kept();
    for (const field of fields) {
      if (field.id in FLAGS) field.checked = values[field.id] ?? false;
      else field.value = values[field.id] ?? field.value;
    }
    find("request").addEventListener("input", () => {
      onChange();
      const values = Object.fromEntries(fields.map(({ id, value, checked }) => [id, id in FLAGS ? checked : value]));
      sessionStorage.setItem(FORM, JSON.stringify(values));
    });
    this.#onChange = onChange;
  }

  #onChange;

  /** Offer models, as ListModels tells them; the one that was chosen stays so. */
  offer(models) {
    const chosen = find("model").value || kept().model;
    this.#models = models;
    find("model").replaceChildren(...models.map(({ name, isReady }) =>
      element("option", { value: name }, isReady ? name : `${name} (not ready)`)));
    if (models.some((model) => model.name === chosen)) find("model").value = chosen;
    this.#chosen();
  }

  get model() {
    return this.#models.find((model) => model.name === find("model").value) ?? null;
  }

  get isReady() {
    return this.#models.length > 0 && this.#models.every((model) => model.isReady);
  }

  get isContinuing() {
    return this.model?.architecture === "decoder";
  }

  /** The request on the form, a GenerateRequest; what the model decides is left out. */
  get request() {
    const request = { model: find("model").value, text: find("text").value };
    for (const side of ["source", "target"]) {
      const said = find(`${side}-language`).value;
      if (said) request[`${side}Language`] = said;
    }
    const search = find("search").value;
    if (search === "greedy") Object.assign(request, { numBeams: 1, doSample: false });
    if (search === "beams") Object.assign(request, { numBeams: number("num-beams") ?? 4, doSample: false });
    if (search === "sampling") Object.assign(request, { numBeams: 1, doSample: true });
    if (search === "beams" || search === "sampling") request.numReturnSequences = number("num-answers") ?? 1;
    for (const [id, name] of Object.entries(NUMBERS)) {
      const said = find(id).value.trim();
      if (said && applies(id, search)) request[name] = id === "seed" ? said : Number(said);
    }
    const most = number("max-new-tokens");
    if (most !== null) request.maxNewTokens = most;
    for (const name of CHOICES) {
      if (find(name).value) request[name] = find(name).value;
    }
    for (const [id, name] of Object.entries(FLAGS)) {
      if (find(id).checked) request[name] = true;
    }
    return request;
  }

  #chosen() {
    const model = this.model;
    if (!model) return;
    languages("source", model.sourceLanguages ?? [], model.defaultSourceLanguage);
    languages("target", model.targetLanguages ?? [], model.defaultTargetLanguage);
    tell(find("model-note"), `${model.domain ? `Domain: ${model.domain}. ` : ""}At most ${model.maxSourceTokens} tokens.`);
    tell(find("text-label"), this.isContinuing ? "Prompt" : "Text");
    tell(find("go"), this.isContinuing ? "Continue" : "Translate");
    find("max-new-tokens").max = model.maxTargetTokens;
    find("max-new-tokens").placeholder = model.defaultMaxNewTokens;
    find("num-beams").max = find("num-answers").max = model.maxSlotsPerRequest || model.maxSlots;
    this.#fit();
  }

  #fit() {
    const search = find("search").value;
    for (const field of document.querySelectorAll("#request [data-for]")) {
      field.hidden = !field.dataset.for.split(" ").includes(search);
      field.querySelector("input").disabled = field.hidden;
    }
    tell(find("options-note"), search);
    this.#onChange();
  }
}

function applies(id, search) {
  return find(id).closest("[data-for]").dataset.for.split(" ").includes(search);
}

function number(id) {
  const said = find(id).value.trim();
  return said === "" || !Number.isFinite(Number(said)) ? null : Number(said);
}

function languages(side, told, usual) {
  const choice = find(`${side}-language`);
  const chosen = choice.value || kept()[choice.id];
  choice.parentElement.hidden = told.length === 0;
  const first = usual || told.length === 1
    ? [element("option", { value: "" }, title(usual || told[0].code))]
    : side === "source" ? [element("option", { value: "" }, "unspecified")] : [];
  const others = told.filter(({ code }) => code !== (usual || (told.length === 1 && told[0].code)));
  choice.replaceChildren(...first, ...others.map(({ code }) => element("option", { value: code }, title(code))));
  if (others.some(({ code }) => code === chosen)) choice.value = chosen;
}

/** Name a language in English, with its code. */
function title(code) {
  try {
    const name = new Intl.DisplayNames("en", { type: "language", fallback: "none" }).of(code.replaceAll("_", "-"));
    return name ? `${name} (${code})` : code;
  } catch {
    return code;
  }
}

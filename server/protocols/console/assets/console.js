// The page: its three views, one shown at a time, and light or dark.
import { Engine } from "./engine.js";
import { find, tell } from "./element.js";
import { Models } from "./models.js";
import { Server } from "./server.js";
import { Token } from "./token.js";
import { Try } from "./try.js";

const server = new Server(new Token("dragoman-token", "Token"));
const operators = new Server(new Token("dragoman-operator-token", "Operator's token"));
const views = { try: new Try(server), engine: new Engine(server), models: new Models(server, operators) };
const tabs = Object.keys(views).map((name) => find(`tab-${name}`));

function open(name, isFocused = false) {
  for (const tab of tabs) {
    const isThis = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(isThis));
    tab.tabIndex = isThis ? 0 : -1;
    if (isThis && isFocused) tab.focus();
  }
  for (const [other, view] of Object.entries(views)) {
    find(`view-${other}`).hidden = other !== name;
    if (other !== name) view.hide();
  }
  if (location.hash.slice(1) !== name) history.replaceState(null, "", `#${name}`);
  if (!document.hidden) views[name].show();
}

// No element has a view's name as its id: the browser would scroll to it, past the header, and start the keyboard's order there.
const named = () => (Object.hasOwn(views, location.hash.slice(1)) ? location.hash.slice(1) : "try");

tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => open(tab.id.slice(4)));
  tab.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const next = event.key in steps ? tabs[(i + steps[event.key] + tabs.length) % tabs.length] : { Home: tabs[0], End: tabs.at(-1) }[event.key];
    if (!next) return;
    event.preventDefault();
    open(next.id.slice(4), true);
  });
});
addEventListener("hashchange", () => open(named()));
// Whoever does not look is sent nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? views[named()].hide() : open(named())));

const THEMES = ["auto", "light", "dark"];

function theme(name) {
  document.documentElement.dataset.theme = name;
  tell(find("theme"), `◐ ${name}`);
  find("theme").ariaLabel = find("theme").title = `Theme: ${name}`;
}

let chosen = localStorage.getItem("dragoman-theme");
theme(THEMES.includes(chosen) ? chosen : "auto");
find("theme").addEventListener("click", () => {
  chosen = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("dragoman-theme", chosen);
  theme(chosen);
});
open(named());

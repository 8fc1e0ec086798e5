// Elements, made by name: no text of anybody's is ever read as markup.

export const find = (id) => document.getElementById(id);

/** Make an element. `properties` are attributes; `on` has listeners, `style` custom properties; null and false are left out. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (key === "style") for (const [one, said] of Object.entries(value)) made.style.setProperty(one, said);
    else if (value !== null && value !== false && value !== undefined) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set an element's text, and touch nothing where it is the same. */
export function tell(what, text) {
  if (what.textContent !== text) what.textContent = text;
}

/** Have badges below an element tell that nothing is known any more. */
export function forget(what) {
  for (const badge of what.querySelectorAll(".badge")) {
    badge.dataset.kind = "wait";
    tell(badge, "unknown");
  }
}

export const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`);

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  for (; bytes >= 1024 && i < 3; i++) bytes /= 1024;
  return `${bytes.toFixed(i && bytes < 10 ? 1 : 0)} ${units[i]}`;
}

export function seconds(time) {
  if (time >= 120) return `${Math.floor(time / 3600) ? `${Math.floor(time / 3600)} h ` : ""}${Math.floor(time / 60) % 60} min`;
  return time >= 1 ? `${time.toFixed(time < 10 ? 2 : 0)} s` : `${(time * 1000).toFixed(time < 0.01 ? 1 : 0)} ms`;
}

/** Copy an element's text, and say on the button what was done. */
export async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    tell(button, "Copied");
  } catch {  // pages without TLS may not write it: select it instead
    getSelection().selectAllChildren(code);
    tell(button, "Selected");
  }
  setTimeout(() => tell(button, "Copy"), 2000);
}

"""The style sheet of a page of attention, light and dark; and its script, without which all is drawn too."""

from typing import Final

LEVELS: Final = 16
"""Shades of a weight; a cell's is that of its weight's square root, so that small ones can be told apart too."""
CELL: Final = 12
"""Side of a cell in a map's own units."""
ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

STYLE: Final = (
    """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c1e21;--soft:#5c6470;--rule:#dfe2e6;--heat:#08468c;--mark:#d05a00}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8eaed;--soft:#a3abb6;--rule:#33383f;
--heat:#8cc7ff;--mark:#ffb454}}
*{box-sizing:border-box}
html{scroll-padding-top:8px}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1720px;margin:0 auto;padding:24px 20px 80px;--width:300px}
h1{font-size:24px;margin:0 0 8px}
h2{font-size:20px;margin:40px 0 4px;padding-top:12px;border-top:1px solid var(--rule)}
h3{font-size:16px;margin:22px 0 8px}
p,dl{margin:6px 0;max-width:100ch}
p,dt{color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px}
dd{margin:0;overflow-wrap:anywhere}
a{color:inherit}
nav ul{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:10px 0;padding:0}
.bar{display:flex;flex-wrap:wrap;gap:8px 28px;align-items:center;margin:14px 0;color:var(--soft);font-size:13px}
fieldset{display:flex;gap:12px;border:0;margin:0;padding:0}
legend{float:left;padding:0 12px 0 0}
.scale{display:flex;align-items:center;gap:4px 10px;margin:0}
.scale svg{width:18px;height:18px;vertical-align:middle;margin-right:4px}
main:has(#small:checked){--width:190px}
main:has(#large:checked){--width:560px}
.maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--width)),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px 10px;max-width:820px}
figcaption{font-size:13px;color:var(--soft)}
.map{display:block;width:100%;height:auto;max-height:90vh;outline-offset:2px}
.tokens{position:absolute}
text{fill:var(--ink);font-size:10px;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.rows{text-anchor:end}
.frame{fill:none;stroke:var(--rule);stroke-width:1}
.cells{stroke:var(--heat);stroke-width:1;fill:none;shape-rendering:crispEdges}
.cursor{fill:none;stroke:var(--mark);stroke-width:2}
output{position:fixed;left:0;right:0;bottom:0;padding:8px 20px;background:var(--card);border-top:1px solid var(--rule);
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
output:empty{display:none}
@media print{output,nav,fieldset{display:none}figure{break-inside:avoid}}
"""
    + "".join(f".l{level}{{stroke-opacity:{level / LEVELS:.4g}}}" for level in range(1, LEVELS))
    + "\n"
)

# Shows the weight under the pointer, or that which the arrow keys lead to, with its two tokens.
SCRIPT: Final = f"""
"use strict";
(() => {{
  const output = document.querySelector("output"), alphabet = "{ALPHABET}", size = {CELL};
  const texts = id => [...document.querySelectorAll("#" + id + " text")].map(text => text.textContent);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("width", size);
  cursor.setAttribute("height", size);
  const tokens = {{}};
  for (const map of document.querySelectorAll("svg.map")) {{
    const {{kind, left, top, weights}} = map.dataset, lines = weights.split(".");
    tokens[kind] ??= {{rows: texts(kind + "-rows"), columns: texts(kind + "-columns")}};
    const {{rows, columns}} = tokens[kind];
    let row = 0, column = 0;
    const show = (r, c) => {{
      row = Math.min(Math.max(r, 0), rows.length - 1);
      column = Math.min(Math.max(c, 0), columns.length - 1);
      const pair = lines[row].slice(2 * column, 2 * column + 2) || "AA";
      const weight = (alphabet.indexOf(pair[0]) * 64 + alphabet.indexOf(pair[1])) / 4095;
      cursor.setAttribute("x", +left + column * size);
      cursor.setAttribute("y", +top + row * size);
      map.append(cursor);
      const name = map.querySelector("title").textContent;
      output.textContent = `${{name}}: ${{rows[row]}} → ${{columns[column]}} ${{weight.toFixed(3)}}`;
    }};
    map.tabIndex = 0;
    map.addEventListener("pointermove", event => {{
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(map.getScreenCTM().inverse());
      const r = Math.floor((at.y - top) / size), c = Math.floor((at.x - left) / size);
      if (r >= 0 && c >= 0 && r < rows.length && c < columns.length) show(r, c);
    }});
    map.addEventListener("focus", () => show(row, column));
    map.addEventListener("keydown", event => {{
      const step = {{ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}}[event.key];
      if (!step) return;
      event.preventDefault();
      show(row + step[0], column + step[1]);
    }});
  }}
}})();
"""

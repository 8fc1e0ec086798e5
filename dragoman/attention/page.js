"use strict";
(() => {
  const output = document.querySelector("output"), alphabet = "{ALPHABET}", size = {CELL};
  const texts = id => [...document.querySelectorAll("#" + id + " text")].map(text => text.textContent);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("width", size);
  cursor.setAttribute("height", size);
  const tokens = {};
  for (const map of document.querySelectorAll("svg.map")) {
    const {kind, left, top, weights} = map.dataset, lines = weights.split(".");
    tokens[kind] ??= {rows: texts(kind + "-rows"), columns: texts(kind + "-columns")};
    const {rows, columns} = tokens[kind];
    let row = 0, column = 0;
    const show = (r, c) => {
      row = Math.min(Math.max(r, 0), rows.length - 1);
      column = Math.min(Math.max(c, 0), columns.length - 1);
      const pair = lines[row].slice(2 * column, 2 * column + 2) || "AA";
      const weight = (alphabet.indexOf(pair[0]) * 64 + alphabet.indexOf(pair[1])) / 4095;
      cursor.setAttribute("x", +left + column * size);
      cursor.setAttribute("y", +top + row * size);
      map.append(cursor);
      const name = map.querySelector("title").textContent;
      output.textContent = `${name}: ${rows[row]} → ${columns[column]} ${weight.toFixed(3)}`;
    };
    map.tabIndex = 0;
    map.addEventListener("pointermove", event => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(map.getScreenCTM().inverse());
      const r = Math.floor((at.y - top) / size), c = Math.floor((at.x - left) / size);
      if (r >= 0 && c >= 0 && r < rows.length && c < columns.length) show(r, c);
    });
    map.addEventListener("focus", () => show(row, column));
    map.addEventListener("keydown", event => {
      const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
      if (!step) return;
      event.preventDefault();
      show(row + step[0], column + step[1]);
    });
  }
})();

"""How a page looks, and the script that sorts its tables. Both stand within the page."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1c2024; --muted: #5a636c; --link: #0b57a4; --rule: #c9cfd6; --grid: #e5e8eb;
  --card: #f5f6f7; --c1: #0069b0; --c2: #c8500a; --c3: #00805a; --c4: #a8478a; --c5: #8a6a00; --c6: #4a5058;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #15181b; --text: #e5e8ea; --muted: #a2abb4; --link: #82bcf7; --rule: #454c54; --grid: #2b3036;
    --card: #1e2226; --c1: #5fb3f0; --c2: #f39152; --c3: #3ccb9f; --c4: #e193c8; --c5: #e3c94a; --c6: #b9c0c8;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--text); overflow-wrap: break-word;
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 64rem; margin: 0 auto; padding: 4rem 1.5rem 5rem; }
header, h2, section > p, nav, .nothing { max-width: 43rem; }
h1 { font-size: clamp(1.75rem, 1.3rem + 2vw, 2.5rem); line-height: 1.15; letter-spacing: -0.015em; margin: 0; }
h2 { font-size: 1.4rem; line-height: 1.3; letter-spacing: -0.005em; margin: 0 0 0.75rem; }
h1, h2 { text-wrap: balance; overflow-wrap: anywhere; }
p { margin: 0 0 1rem; }
section > p { overflow-wrap: anywhere; }
.lead { font-size: 1.2rem; line-height: 1.55; color: var(--muted); margin: 1rem 0 0; overflow-wrap: anywhere; }
section, .run { margin-top: 3.5rem; }
a { color: var(--link); text-underline-offset: 0.15em; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; border-radius: 2px; }
code { font: 0.9em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.hidden {
  position: absolute; width: 1px; height: 1px; margin: -1px; padding: 0; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap;
}
.skip { position: absolute; left: 1rem; top: -4rem; padding: 0.4rem 0.8rem; background: var(--page); z-index: 3; }
.skip:focus { top: 0.75rem; }
nav { margin-top: 2.5rem; padding: 1rem 0; border: solid var(--rule); border-width: 1px 0; font-size: 0.95rem; }
nav b { display: block; font-weight: 600; }
nav ol { margin: 0.4rem 0 0; padding-left: 1.5rem; }
nav li { overflow-wrap: anywhere; padding-left: 0.25rem; }

/* Tables */
.table { margin: 2rem 0 2.5rem; }
.scroll { container-type: inline-size; overflow-x: auto; position: relative; }
.scroll.long { overflow-y: auto; max-height: 80vh; }
table { min-width: min(100%, 26rem); border-collapse: separate; border-spacing: 0; }
table { font-size: 0.94rem; line-height: 1.4; }
caption { text-align: left; padding: 0; }
.caption, figcaption { font-size: 0.94rem; line-height: 1.5; color: var(--text); }
.caption {
  display: inline-block; position: sticky; left: 0; max-width: min(43rem, 100cqi); padding-bottom: 0.6rem;
  overflow-wrap: anywhere;
}
th, td { padding: 0.4rem 1.5rem 0.4rem 0; text-align: left; vertical-align: top; font-weight: 400; }
th:last-child, td:last-child { padding-right: 0.5rem; }
thead th {
  font-weight: 600; vertical-align: bottom; border: solid var(--text); border-width: 1.5px 0 1px;
  background: var(--page);
}
.long thead th { position: sticky; top: 0; z-index: 2; border-top: 0; }
tbody tr:last-child > * { border-bottom: 1.5px solid var(--text); }
tbody tr:not(:last-child) > * { border-bottom: 1px solid var(--grid); }
tr > :first-child { position: sticky; left: 0; background: var(--page); z-index: 1; }
.long thead tr > :first-child { z-index: 3; }
.name, .head { display: block; max-width: 20rem; overflow-wrap: break-word; }
.n .head { max-width: 10rem; margin-left: auto; }
.n { text-align: right; font-variant-numeric: tabular-nums lining-nums; white-space: nowrap; }
thead .n { white-space: normal; }
.n .name { text-align: left; white-space: normal; }
.ours, .n .paper { display: block; }
.spread { display: inline-block; text-align: left; white-space: pre; font-size: 0.86em; color: var(--muted); }
.paper { font-size: 0.82em; color: var(--muted); }
.paper .spread { font-size: 1.049em; }
strong { font-weight: 700; }
.arrow { font-weight: 400; }
.empty, .nothing { color: var(--muted); font-style: italic; }
.empty { text-align: left; }
thead button { all: unset; cursor: pointer; display: block; width: 100%; text-align: inherit; border-radius: 2px; }
thead button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
thead button:hover { text-decoration: underline; text-underline-offset: 0.2em; }
th[aria-sort] .head::after { content: "\\00a0▲"; font-size: 0.7em; color: var(--muted); }
th[aria-sort="descending"] .head::after { content: "\\00a0▼"; }
.note, .meanings { max-width: 43rem; font-size: 0.86rem; line-height: 1.5; color: var(--muted); }
.note { margin: 0.6rem 0 0; }
.note:empty { display: none; }
.meanings { margin: 0.5rem 0 0; }
.meanings dt { display: inline; font-weight: 600; color: var(--text); overflow-wrap: anywhere; }
.meanings dt::after { content: ": "; }
.meanings dd { display: inline; margin: 0; overflow-wrap: anywhere; }

/* Figures */
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 2.5rem 3rem;
  margin: 2rem 0 2.5rem;
}
figure { margin: 0; min-width: 0; container-type: inline-size; }
.figures > figure { max-width: 36rem; }
figure.wide { margin: 2rem 0 2.5rem; }
figcaption { margin-top: 0.6rem; max-width: 43rem; overflow-wrap: anywhere; }
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--muted); }
.chart text { font-variant-numeric: tabular-nums; }
@container (max-width: 24rem) { .chart text { font-size: 15.5px; } }
@container (min-width: 32rem) { .chart text { font-size: 11px; } }
.y-label, .x-label { font-size: 0.82rem; line-height: 1.4; color: var(--muted); overflow-wrap: anywhere; }
.y-label { margin-bottom: 0.35rem; }
.x-label { text-align: center; padding-left: 10%; }
.c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); }
.line { fill: none; stroke: var(--c); stroke-width: 1.9; stroke-linejoin: round; }
.mark { fill: var(--c); stroke: var(--c); stroke-width: 1.3; }
.band { fill: var(--c, var(--muted)); fill-opacity: 0.16; stroke: none; }
.bars { fill: var(--c); fill-opacity: 0.16; stroke: var(--c); stroke-width: 1.6; }
.bar { fill: var(--c); fill-opacity: 0.35; stroke: var(--c); stroke-width: 1; }
.gap { fill: var(--c); fill-opacity: 0.14; stroke: var(--c); stroke-width: 0.8; stroke-dasharray: 3 2; }
.count { fill: var(--muted); fill-opacity: 0.55; }
.grid { fill: none; stroke: var(--grid); stroke-width: 1; }
.axis { fill: none; stroke: var(--muted); stroke-width: 1; }
.diagonal { fill: none; stroke: var(--text); stroke-width: 1.2; stroke-dasharray: 5 4; }
.legend {
  display: flex; flex-wrap: wrap; gap: 0.15rem 1.1rem; list-style: none; margin: 0.5rem 0 0; padding: 0;
  font-size: 0.86rem; line-height: 1.45;
}
.legend li { display: flex; gap: 0.45rem; min-width: 0; }
.legend span { min-width: 0; overflow-wrap: anywhere; }
.swatch { flex: none; margin-top: 0.2em; overflow: visible; }

/* Galleries */
.gallery {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); gap: 1.25rem 1rem; list-style: none;
  margin: 0; padding: 0;
}
.gallery.texts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)); }
.gallery[style] { grid-template-columns: repeat(var(--n), minmax(0, 8rem)); gap: 1rem 0.75rem; }
.gallery li { min-width: 0; }
.gallery img { display: block; max-width: 100%; height: auto; background: var(--card); }
.pixels { image-rendering: pixelated; }
.label { margin: 0.35rem 0 0; font-size: 0.82rem; line-height: 1.4; color: var(--muted); overflow-wrap: anywhere; }
.label { font-variant-numeric: tabular-nums; }
blockquote {
  margin: 0; padding: 0.7rem 0.9rem; background: var(--card); border-left: 3px solid var(--rule); line-height: 1.45;
  font-size: 0.94rem; overflow-wrap: anywhere; white-space: pre-line;
}
blockquote::before { content: "“"; } blockquote::after { content: "”"; }

/* How it was run */
.run { border-top: 1px solid var(--rule); padding-top: 1.25rem; font-size: 0.94rem; }
summary { cursor: pointer; font-weight: 600; width: fit-content; }
.facts {
  display: grid; grid-template-columns: minmax(6rem, max-content) minmax(0, 1fr); gap: 0.3rem 1.5rem; margin: 1rem 0 0;
}
.facts dt { color: var(--muted); max-width: 12rem; overflow-wrap: anywhere; }
.facts dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }

@media (max-width: 40rem) {
  body { font-size: 1rem; }
  main { padding: 2rem 1rem 3rem; }
  section, .run { margin-top: 2.75rem; }
  .lead { font-size: 1.08rem; }
  th, td { padding-right: 1rem; }
  .name, .head { max-width: 8rem; }
  .figures { gap: 2.25rem; }
}
@media print {
  @page { margin: 18mm 16mm; }
  html { font-size: 9.5pt; }
  body { font-size: 1rem; }
  main { max-width: none; padding: 0; }
  .skip, .screen { display: none; }
  a { color: inherit; }
  nav, figure, blockquote, .gallery li, tr, .facts { break-inside: avoid; }
  h2, caption { break-after: avoid; }
  section { margin-top: 2rem; }
  .scroll, .scroll.long { overflow: visible; max-height: none; container-type: normal; }
  table { font-size: 0.86rem; }
  th, td { padding-right: 0.9rem; }
  .name, .head, .n .head { max-width: 8rem; }
  tr > :first-child, .long thead th { position: static; }
  thead { display: table-header-group; }
  .figures { grid-template-columns: 1fr 1fr; gap: 1.5rem 2rem; }
  details::details-content { content-visibility: visible; block-size: auto; }
  .band, .bars, .bar, .gap, .count, blockquote { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

SCRIPT = """
"use strict";
(() => {
  const order = new Intl.Collator(undefined, { numeric: true, sensitivity: "base" });
  // Numbers before texts, and what is missing last in both directions.
  const read = (row, i) => {
    const cell = row.cells[i], number = cell.dataset.sort;
    if (number === "") return { rank: 2, value: 0 };
    if (number !== undefined) return { rank: 0, value: Number(number) };
    return { rank: 1, value: cell.textContent.trim() };
  };
  const compare = (a, b, sign) => {
    if (a.rank !== b.rank) return a.rank - b.rank;
    if (a.rank === 1) return sign * order.compare(a.value, b.value);
    return a.value === b.value ? 0 : sign * (a.value < b.value ? -1 : 1);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.dataset.first, second = first === "ascending" ? "descending" : "ascending";
        const next = { [first]: second, [second]: null }[head.getAttribute("aria-sort")];
        const direction = next === undefined ? first : next;
        for (const other of heads) other.removeAttribute("aria-sort");
        let sorted = rows;
        if (direction) {
          head.setAttribute("aria-sort", direction);
          const sign = direction === "ascending" ? 1 : -1;
          sorted = rows.map(row => [read(row, i), row]).sort((a, b) => compare(a[0], b[0], sign)).map(pair => pair[1]);
        }
        body.append(...sorted);
      });
    });
    const box = table.closest(".table"), hint = document.createElement("span");
    hint.className = "screen";
    hint.textContent = " Select a heading to sort by it.";
    box.querySelector(".note").append(hint);
  }
  const opened = [];
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open])")) { part.open = true; opened.push(part); }
  });
  addEventListener("afterprint", () => { while (opened.length) opened.pop().open = false; });
})();
"""

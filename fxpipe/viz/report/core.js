// Reads the data, makes elements, writes numbers.  Names of a user's model become text nodes, never markup.
"use strict";

async function unpack(id) {
  const letters = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// el("td", {class: "n", onclick: f}, "text", child, …)
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  return fill(made, ...children);
}

// Put children into an element: elements, texts, and lists of them; nothing for null and false.
function fill(element, ...children) {
  element.replaceChildren(
    ...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

const byId = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// Three significant digits, as fxpipe/units.py writes them.
function digits(number) {
  if (number === 0) return "0";
  const after = clamp(2 - Math.floor(Math.log10(Math.abs(number))), 0, 20);
  const text = number.toFixed(after);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function scaled(count, base, units) {
  let k = 0;
  for (; k < units.length - 1 && Math.abs(count) >= base; k++) count /= base;
  return `${digits(count)} ${units[k]}`;
}

let BYTES = [1024, ["B", "KiB", "MiB", "GiB", "TiB"]]; // or powers of 1000, as the memory limit is written
const bytesText = (count) => scaled(count, ...BYTES);
const flopsText = (count) => scaled(count, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
const countText = (count) => scaled(count, 1000, ["", "k", "M", "G", "T"]).trim();
const numberOf = (count, thing) => `${count} ${thing}${count === 1 ? "" : thing.endsWith("ch") ? "es" : "s"}`;
const percent = (share) => `${digits(100 * share)}%`;
const percent0 = (share) => `${Math.round(100 * share)}%`;
const bubbleText = (share) => `${(100 * share).toFixed(2)}%`; // as fxpipe/units.py writes it

function secondsText(seconds) {
  for (const [unit, size] of [
    ["s", 1],
    ["ms", 1e-3],
    ["µs", 1e-6],
  ])
    if (Math.abs(seconds) >= 0.9995 * size) return `${digits(seconds / size)} ${unit}`;
  return seconds ? `${digits(seconds / 1e-9)} ns` : "0 s";
}

// A color of style.css: those of the light or of the dark page.
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const PADDING = 28; // pixels right of a plot over time: half of a label

// A table with a head; cells are texts or elements, those of columns in `right` are numbers.
function table(heads, rows, right = []) {
  const cell = (tag, content, k) => el(tag, { class: right.includes(k) ? "n" : null }, content);
  return el(
    "table",
    {},
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        heads.map((head, k) => cell("th", head, k)),
      ),
    ),
    el(
      "tbody",
      {},
      rows.map((row) =>
        row instanceof Element
          ? row
          : el(
              "tr",
              {},
              row.map((x, k) => cell("td", x, k)),
            ),
      ),
    ),
  );
}

// A bar of parts side by side, each {share, class, title}.
const bar = (parts) =>
  el(
    "div",
    { class: "bar" },
    parts.map((part) => {
      const made = el("span", { class: part.class, title: part.title });
      made.style.width = `${100 * part.share}%`;
      return made;
    }),
  );

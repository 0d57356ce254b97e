// Builds elements. Text becomes text nodes, never markup: text of models, sandboxes and run folders is hostile.

import { visible } from "./visible.js";

const SVG = "http://www.w3.org/2000/svg";
const URLS = new Set(["href", "src", "action", "formaction", "xlink:href"]);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (URLS.has(name) && !/^#|^\/static\//.test(value)) throw new Error(`not an address of this page: ${name}`);
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : visible(String(child)));
  }
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function replace(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

export const link = (address, attributes, ...children) => h("a", { ...attributes, href: address }, ...children);

export function section(title, note, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  return h("section", { class: "section", "aria-labelledby": id }, h("h2", { id }, title), note && h("p", { class: "sub" }, note), ...children);
}

export function table(columns, rows, attributes) {
  const head = columns.map((column) => h("th", { scope: "col", class: column.class }, column.title));
  const body = rows.map((row) => h("tr", row.attributes, row.cells.map((cell, n) => h("td", { class: columns[n].class }, cell))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": (attributes && attributes.label) || "Table" },
    h("table", { class: attributes && attributes.class }, h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}

export const chip = (text, style) => h("span", { class: `chip ${style || ""}` }, text);

export function notes(lines) {
  if (!lines || !lines.length) return null;
  return h("div", { class: "notes", role: "note" }, [...new Set(lines)].map((line) => h("p", null, line)));
}

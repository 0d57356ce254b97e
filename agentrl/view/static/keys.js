// Keyboard shortcuts of the current page, and the list of them behind `?`.

import { h, replace } from "./dom.js";

let bound = {};

// `keys`: key -> [what it does, action].
export function bind(keys) {
  bound = { ...keys };
}

export function showKeys() {
  const dialog = document.getElementById("keys");
  const rows = Object.entries(bound).map(([key, [what]]) => h("tr", null, h("td", null, h("kbd", null, key)), h("td", null, what)));
  replace(dialog,
    h("h2", { id: "keys-title" }, "Keyboard shortcuts"),
    h("table", null, h("tbody", null, rows, h("tr", null, h("td", null, h("kbd", null, "?")), h("td", null, "show these keys")))),
    h("form", { method: "dialog" }, h("button", { class: "button", type: "submit" }, "Close")));
  if (!dialog.open) dialog.showModal();
}

function typing(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || document.querySelector("dialog[open]")) return;
  if (event.key === "?") {
    showKeys();
    event.preventDefault();
  } else if (Object.hasOwn(bound, event.key)) {
    bound[event.key][1](event);
    event.preventDefault();
  }
});

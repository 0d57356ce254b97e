// Operations that change a run. Each requires a confirmation.

import { post } from "./api.js";
import { h, replace } from "./dom.js";

export function confirmed(what) {
  const dialog = document.getElementById("confirm");
  return new Promise((settle) => {
    replace(dialog, h("h2", { id: "confirm-title" }, "Change this run?"), h("p", null, what), h("p", { class: "sub" }, "The change is recorded in operations.jsonl of the run folder."), h("form", { method: "dialog", class: "inline" }, h("button", { class: "button", type: "submit", value: "no" }, "Cancel"), h("button", { class: "button strong", type: "submit", value: "yes" }, "Confirm")));
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => settle(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
  });
}

// Asks, sends an operation, and writes its result into `slot`. Returns the answer; null if it was cancelled or failed.
export async function operate(run, name, fields, what, slot) {
  if (!(await confirmed(what))) return null;
  try {
    const answer = await post(["runs", run, "operations", name], fields);
    slot.textContent = answer.message;
    return answer;
  } catch (error) {
    slot.textContent = [error.message, error.fix].filter(Boolean).join("; ");
    return null;
  }
}

// The episodes of a run: full-text search, filters and pages. The address has the filters, so it is a permalink.

import { address, go } from "./app.js";
import { get } from "./api.js";
import { chip, h, link, notes, replace, section, table } from "./dom.js";
import { duration, number } from "./format.js";
import { bind } from "./keys.js";
import { runTabs } from "./page_run.js";
import { OUTCOME_STYLES } from "./page_step.js";

const SELECTS = [["phase", "phases", "phase"], ["kind", "kinds", "kind"], ["outcome", "outcomes", "outcome"], ["stop_reason", "stop_reasons", "end"], ["tool", "tools", "tool"], ["exclusion", "exclusions", "cause of exclusion"]];
const NUMBERS = [["step", "step"], ["version", "version"], ["min_score", "score from"], ["max_score", "score to"], ["min_tokens", "tokens from"]];

export async function render(visit) {
  const run = visit.params.run;
  visit.title("Episodes", [[run, address("run", run)], ["episodes", null]]);
  const facets = await get(["runs", run, "facets"]);
  if (visit.stale) return;
  if (!facets.episodes && facets.notes.length) {
    visit.show(h("h1", { tabindex: "-1", "data-focus": true }, run), runTabs(run, "Episodes"), notes(facets.notes));
    return;
  }
  const fields = {}, results = h("div", { "aria-live": "polite" });
  const form = h("form", { class: "filters", role: "search", "aria-label": "Filters" });
  const add = (name, label, input) => {
    input.name = name;
    input.value = visit.query.get(name) || "";
    fields[name] = input;
    form.append(h("label", null, h("span", null, label), input));
  };
  add("text", "text", h("input", { type: "search", placeholder: "words in messages, calls, outputs", size: "34" }));
  for (const [name, facet, label] of SELECTS) {
    const values = Object.entries(facets[facet] || {});
    if (values.length > (name === "kind" || name === "tool" ? 0 : 1) || visit.query.get(name)) add(name, label, h("select", null, h("option", { value: "" }, "any"), [...new Set([...values.map(([value]) => value), visit.query.get(name) || ""])].filter(Boolean).map((value) => h("option", { value }, `${value} (${number((facets[facet] || {})[value] || 0)})`))));
  }
  for (const [name, label] of NUMBERS) add(name, label, h("input", { type: "number", step: "any", class: "short" }));
  add("sort", "order", h("select", null, ["newest", "score", "tokens", "turns", "seconds"].map((value) => h("option", { value }, value))));
  if (!fields.sort.value) fields.sort.value = "newest";
  add("ascending", "direction", h("select", null, h("option", { value: "" }, "largest first"), h("option", { value: "1" }, "smallest first")));

  const wanted = () => Object.fromEntries(Object.entries(fields).map(([name, input]) => [name, input.value]).filter(([name, value]) => value && !(name === "sort" && value === "newest")));
  const row = (one) => ({ cells: [link(one.group === null ? address("run", run, "evaluated", one.id) : address("run", run, "groups", one.group, one.attempt), { class: "name" }, one.id), one.phase, one.step === null ? "–" : link(address("run", run, "steps", one.step), null, String(one.step)), one.kind || "–", chip(one.outcome, OUTCOME_STYLES[one.outcome] || ""), one.score === null ? "–" : number(one.score, 3), number(one.tokens), number(one.turns), duration(one.seconds), one.tools.join(", "), one.exclusion || one.stop, one.versions[0] === null ? "–" : one.versions[0] === one.versions[1] ? `v${one.versions[0]}` : `v${one.versions[0]}–${one.versions[1]}`] });
  const columns = [{ title: "Episode" }, { title: "Phase" }, { title: "Step", class: "num" }, { title: "Kind" }, { title: "Outcome" }, { title: "Score", class: "num" }, { title: "Tokens", class: "num" }, { title: "Turns", class: "num" }, { title: "Time", class: "num" }, { title: "Tools" }, { title: "Ended" }, { title: "Version" }];
  let asked = 0;
  const search = async (rows, after) => {
    const turn = (asked += 1), data = await get(["runs", run, "episodes"], { ...wanted(), after });
    if (visit.stale || turn !== asked) return;
    const shown = [...rows, ...data.rows];
    const more = data.next && h("button", { class: "button", type: "button" }, "More");
    if (more) more.addEventListener("click", () => search(shown, data.next).catch((error) => visit.fail(error)));
    replace(results, h("p", { class: "sub" }, `${data.is_exact ? "" : "more than "}${number(data.total)} episodes match`), shown.length ? table(columns, shown.map(row), { class: "wide", label: "Episodes" }) : h("p", { class: "empty" }, "No episode matches these filters."), more && h("p", null, more));
  };
  const changed = () => {
    const query = new URLSearchParams(wanted()).toString();
    history.replaceState(null, "", `${address("run", run, "episodes")}${query ? `?${query}` : ""}`);
    search([], "").catch((error) => replace(results, notes([error.message])));
  };
  let timer = null;
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(changed, 200);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    changed();
  });
  bind({ "/": ["search", () => fields.text.focus()], u: ["the run", () => go(address("run", run))] });
  visit.show(h("h1", { tabindex: "-1", "data-focus": true }, run), runTabs(run, "Episodes"), notes(facets.notes), section("Episodes", `${number(facets.episodes)} stored`, form, results));
  if (facets.episodes || !facets.notes.length) changed();
}

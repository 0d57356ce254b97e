// The list of runs: search, and a choice of runs to compare.

import { address, go } from "./app.js";
import { get } from "./api.js";
import { chip, h, link, notes, replace, table } from "./dom.js";
import { ago, count, duration, number, percent } from "./format.js";
import { bind } from "./keys.js";

const STYLES = { running: "good", finished: "", failed: "bad", killed: "bad", interrupted: "part" };
export const state = (name) => chip(name, STYLES[name] || "");

const rate = (value) => (value ? `${percent(value.value)} [${percent(value.ci_low)} – ${percent(value.ci_high)}]` : "–");

export async function render(visit) {
  visit.title("Runs", []);
  const chosen = new Set(), list = h("div"), button = h("button", { class: "button", type: "button", disabled: true }, "Compare");
  const search = h("input", { type: "search", placeholder: "name, recipe or model", "aria-label": "Search runs", value: visit.query.get("search") || "" });

  const update = () => {
    button.disabled = chosen.size < 2;
    button.textContent = chosen.size ? `Compare ${chosen.size} runs` : "Compare";
  };
  const row = (run) => {
    const box = h("input", { type: "checkbox", "aria-label": `Select ${run.name} for a comparison` });
    box.checked = chosen.has(run.id);
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.id);
      else chosen.delete(run.id);
      update();
    });
    const progress = run.steps ? `${run.step ?? 0} of ${run.steps}` : number(run.step);
    return { cells: [box, [link(address("run", run.id), { class: "name" }, run.name), run.problems.length ? h("p", { class: "sub bad" }, run.problems[0]) : null], state(run.state), progress, number(run.reward, 3), rate(run.after), count(run.episodes), duration(run.wall_s), run.changed_at ? ago(run.changed_at) : "–"] };
  };
  let drawn = null;
  const draw = async () => {
    const data = await get(["runs"], { search: search.value });
    const text = JSON.stringify(data.runs);
    if (visit.stale || text === drawn) return data;
    drawn = text;
    replace(list, data.runs.length
      ? table([{ title: h("span", { class: "quiet" }, "") }, { title: "Run" }, { title: "State" }, { title: "Step", class: "num" }, { title: "Reward", class: "num" }, { title: "Held-out, after [95% interval]" }, { title: "Episodes", class: "num" }, { title: "Time", class: "num" }, { title: "Changed" }], data.runs.map(row), { class: "wide", label: "Runs" })
      : h("p", { class: "empty" }, search.value ? "No run matches." : "There is no run in this folder yet. `agentrl train RECIPE` starts one."),
      data.total > data.runs.length && notes([`${data.total - data.runs.length} more runs: search to find them`]));
    return data;
  };
  let timer = null;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => draw().catch((error) => visit.fail(error)), 150);
  });
  button.addEventListener("click", () => go(`#/compare?${[...chosen].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`));
  bind({ "/": ["search", () => search.focus()] });
  await draw();
  visit.show(h("div", { class: "top" }, h("h1", { tabindex: "-1", "data-focus": true }, "Runs"), h("span", { class: "grow" }), search, button), list);
  const repeat = setInterval(() => { if (!document.hidden) draw().catch(() => {}); }, 5000);
  visit.onLeave(() => clearInterval(repeat));
}

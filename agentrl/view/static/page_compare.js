// Two or more runs: what differs in their recipes, their curves, success by kind with intervals, and cost.

import { address } from "./app.js";
import { get } from "./api.js";
import { lineChart } from "./chart.js";
import { h, link, notes, section, table } from "./dom.js";
import { count, duration, number, percent, signed } from "./format.js";

const TITLES = { reward_mean: "Mean training reward", heldout: "Held-out success", entropy: "Entropy, nats", kl_behaviour: "KL to the behaviour policy", clip_fraction: "Clipped tokens", grad_norm: "Gradient norm", completion_tokens_mean: "Tokens per episode", step_s: "Seconds per step" };
const FORMS = { "wall time": duration, "median step": duration, "tokens trained": count };

export async function render(visit) {
  const runs = visit.query.getAll("run"), data = await get(["compare"], { run: runs });
  if (visit.stale) return;
  visit.title("Compare", [["compare", null]]);
  const heads = () => data.runs.map((run, n) => ({ title: [h("i", { class: `key c${n + 1}` }), link(address("run", run.id), null, run.name)] })), last = data.runs.length > 1;
  const rate = (one) => (one === null ? "–" : [percent(one.value), h("small", null, ` [${percent(one.ci_low)} – ${percent(one.ci_high)}] n = ${one.n}`)]);
  const difference = (row) => {
    if (!row.difference) return "–";
    const [value, low, high] = row.difference.map((one) => 100 * one);
    return h("span", { class: low > 0 ? "good" : high < 0 ? "bad" : "" }, `${signed(value, 3)} [${signed(low, 3)}, ${signed(high, 3)}]`);
  };
  const rates = (rows, title) => table([{ title }, ...heads(), ...(last ? [{ title: "Last − first, points [95%]" }] : [])], rows.map((row) => ({ cells: [row.name, ...row.rates.map(rate), ...(last ? [difference(row)] : [])] })));
  const curves = Object.entries(data.curves).map(([key, lines]) => [key, lines.map((points, n) => ({ label: data.runs[n].name, points, colour: n + 1 })).filter((one) => one.points.length)]).filter(([, lines]) => lines.length);
  visit.show(h("h1", { tabindex: "-1", "data-focus": true }, `Compare ${data.runs.length} runs`), notes([...data.notes, ...data.comparison_notes]),
    curves.length ? section("Curves", null, h("div", { class: "multiples two" }, curves.map(([key, lines]) => h("article", { class: "card" }, h("h3", null, TITLES[key] || key), lineChart(lines, { title: TITLES[key] || key, width: 520, height: 210 }))))) : null,
    data.rates.length ? section("Held-out success", null, rates(data.rates, "Split")) : null,
    data.kinds.length ? section("Success by kind", "After training, with 95% intervals, which treat the runs as independent.", rates(data.kinds, "Kind")) : null,
    section("Settings that differ", data.settings.length ? null : "The recipes are equal.", data.settings.length ? table([{ title: "Key" }, ...heads()], data.settings.map((row) => ({ cells: [h("code", null, row.key), ...row.values.map((value) => h("code", null, value))] }))) : null),
    section("Cost", null, table([{ title: "" }, ...heads().map((head) => ({ ...head, class: "num" }))], data.costs.map((row) => ({ cells: [row.name, ...row.values.map((value) => (value === null ? "–" : (FORMS[row.name] || ((one) => number(one, 4)))(value)))] })))));
}

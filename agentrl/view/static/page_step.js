// A learner step: what changed since the step before, and its groups.

import { address, go } from "./app.js";
import { get } from "./api.js";
import { chip, h, link, notes, replace, section, table } from "./dom.js";
import { number, percent, signed } from "./format.js";
import { bind } from "./keys.js";

const TILES = [["reward_mean", "mean reward"], ["groups_without_signal", "groups without signal"], ["entropy", "entropy, nats"], ["kl_behaviour", "KL to behaviour policy"], ["clip_fraction", "clipped tokens"], ["grad_norm", "gradient norm"], ["staleness_mean", "staleness"], ["completion_tokens_mean", "tokens per episode"]];
const NO_BETTER = new Set(["reward_mean"]);
export const OUTCOME_STYLES = { solved: "good", failed: "bad", partial: "part" };

export function dots(run, line, current) {
  return h("span", { class: "dots" }, line.scores.map((score, attempt) => {
    const style = score.excluded ? "excluded" : score.value === null ? "unscored" : score.outcome === "failed" ? "zero" : score.outcome;
    const text = score.excluded ? "excluded" : score.pending ? "waits for a score" : score.value === null ? "no score" : `score ${number(score.value, 3)}`;
    const advantage = line.advantages[attempt];
    return link(address("run", run, "groups", line.group, attempt), { class: `dot-link ${style}${attempt === current ? " here" : ""}`, title: `attempt ${attempt}: ${text}${advantage === null || advantage === undefined ? "" : `, advantage ${signed(advantage)}`}`, "aria-label": `attempt ${attempt} of group ${line.group}, ${text}` },
      score.value === null || score.excluded ? "·" : score.value === 0 || score.value === 1 ? "" : String(Math.round(score.value * 100)));
  }));
}

export function groupsTable(run, lines) {
  const row = (line) => ({
    attributes: { class: line.state === "excluded" || line.explanation ? "quiet-row" : null },
    cells: [
      link(address("run", run, "groups", line.group), { class: "name", "data-group": String(line.group) }, `group ${line.group}`),
      line.kind || "–",
      dots(run, line),
      number(line.mean, 3),
      spread(line),
      line.oldest_version === null ? "–" : `v${line.oldest_version}`,
      line.problem ? h("span", { class: "bad" }, line.problem) : line.fault ? h("span", { class: "bad" }, line.fault) : line.explanation ? h("span", { title: line.explanation }, short(line)) : line.state === "trained" ? `${number(line.tokens_trained)} tokens trained` : line.state,
    ],
  });
  return table([{ title: "Group" }, { title: "Kind" }, { title: "Attempts" }, { title: "Mean", class: "num" }, { title: "Advantages" }, { title: "Version" }, { title: "Trained" }], lines.map(row), { label: "Groups" });
}

function short(line) {
  return line.reason.startsWith("all_equal") ? "no signal: all scores are equal" : line.explanation;
}

function spread(line) {
  const known = line.advantages.filter((value) => value !== null);
  return known.length ? `${signed(Math.min(...known), 2)} … ${signed(Math.max(...known), 2)}` : "–";
}

export async function render(visit) {
  const { run, step } = visit.params;
  await visit.follow(run, async (mark) => {
    const offset = Number(visit.query.get("offset") || 0), data = await get(["runs", run, "steps", step], { offset });
    if (visit.stale || (mark && data.groups.every((line) => line.state === "trained" || line.state === "excluded") && visit.complete)) return;
    visit.complete = data.groups.length > 0 && data.groups.every((line) => line.state === "trained" || line.state === "excluded");
    visit.title(`Step ${step}`, [[run, address("run", run)], [`step ${step}`, null]]);
    visit.show(page(visit, run, Number(step), data));
  });
}

function page(visit, run, step, data) {
  const to = (other) => address("run", run, "steps", other);
  const slot = h("div"), kind = h("select", { "aria-label": "Kind of task" }), order = h("select", { "aria-label": "Order of the groups" });
  kind.append(h("option", { value: "" }, "all kinds"), ...[...new Set(data.groups.map((line) => line.kind))].filter(Boolean).sort().map((name) => h("option", { value: name }, name)));
  order.append(...[["mean", "lowest score first"], ["advantage", "largest advantage first"], ["group", "by number"]].map(([value, name]) => h("option", { value }, name)));
  const peak = (line) => Math.max(0, ...line.advantages.map((value) => Math.abs(value || 0)));
  const draw = () => {
    const lines = data.groups.filter((line) => !kind.value || line.kind === kind.value);
    if (order.value === "mean") lines.sort((a, b) => (a.mean ?? 9e9) - (b.mean ?? 9e9) || a.group - b.group);
    if (order.value === "advantage") lines.sort((a, b) => peak(b) - peak(a) || a.group - b.group);
    replace(slot, lines.length ? groupsTable(run, lines) : h("p", { class: "empty" }, data.is_unreadable ? "The groups cannot be read." : "The ledger has no group of this step yet."));
  };
  kind.addEventListener("change", draw);
  order.addEventListener("change", draw);
  draw();
  bind({
    j: ["next step", () => data.next !== null && go(to(data.next))],
    k: ["previous step", () => data.previous !== null && go(to(data.previous))],
    u: ["the run", () => go(address("run", run))],
  });
  return h("div", null,
    h("div", { class: "top" }, h("h1", { tabindex: "-1", "data-focus": true }, `Step ${step}`), fell(data), h("span", { class: "grow" }), pager(to, data)),
    h("p", { class: "sub" }, `Version ${step} is the result of this step.`),
    notes(data.notes),
    tiles(data),
    kinds(data, (name) => { kind.value = name; draw(); slot.scrollIntoView({ block: "start" }); }),
    section("Groups", "Each square is an attempt: green is solved, red is 0 or less, grey has no score. Click a square to open the episode.", h("div", { class: "controls" }, kind, order), slot),
    data.total > data.groups.length ? h("p", { class: "controls" }, `${data.offset + 1} to ${data.offset + data.groups.length} of ${data.total} groups`, " ", data.offset + data.groups.length < data.total ? link(`${to(step)}?offset=${data.offset + data.groups.length}`, { class: "button" }, "More") : null) : null);
}

function fell(data) {
  const now = data.metrics.reward_mean, before = data.before.reward_mean;
  if (now === undefined || before === undefined) return null;
  return chip(`reward ${number(before, 3)} → ${number(now, 3)}`, now < before ? "bad" : now > before ? "good" : "");
}

export function pager(to, data) {
  return h("span", { class: "pager" },
    data.previous === null || data.previous === undefined ? null : link(to(data.previous), { class: "button", "aria-label": "Previous" }, "← previous"),
    data.next === null || data.next === undefined ? null : link(to(data.next), { class: "button", "aria-label": "Next" }, "next →"));
}

function tiles(data) {
  const shown = TILES.filter(([key]) => data.metrics[key] !== undefined);
  return h("div", { class: "tiles" }, shown.map(([key, label]) => {
    const now = data.metrics[key], before = data.before[key], change = before === undefined ? null : now - before;
    return h("div", { class: "tile" }, h("b", null, number(now, 3)), h("span", null, label), change === null || change === 0 ? null : h("small", { class: NO_BETTER.has(key) ? (change < 0 ? "bad" : "good") : "" }, `${signed(change, 2)} since step ${data.previous}`));
  }));
}

function kinds(data, pick) {
  if (!data.kinds.length) return null;
  const cell = (value) => (value === null ? "–" : percent(value, 0));
  return section("Scores by kind of task", "Mean over the groups of this step and of the previous step, with the largest fall first. Each step has different tasks, so small changes may be due to chance.",
    table([{ title: "Kind" }, { title: "Before", class: "num" }, { title: "Now", class: "num" }, { title: "Change", class: "num" }, { title: "Groups", class: "num" }], data.kinds.map((row) => {
      const change = row.now === null || row.before === null ? null : row.now - row.before;
      return { cells: [h("button", { class: "linklike", type: "button", onclick: () => pick(row.kind) }, row.kind), cell(row.before), cell(row.now), h("span", { class: change < 0 ? "bad" : change > 0 ? "good" : "" }, change === null ? "–" : `${signed(100 * change, 2)} points`), number(row.groups)] };
    }), { class: "kinds" }));
}

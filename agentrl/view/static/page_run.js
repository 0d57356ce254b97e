// A run: its curves, where the reward fell, what its parts did, alerts, gate history and the ledger's counts.

import { address, go } from "./app.js";
import { get } from "./api.js";
import { lineChart, stackedBar } from "./chart.js";
import { chip, h, link, notes, section, table } from "./dom.js";
import { count, duration, number, percent } from "./format.js";
import { Activity } from "./activity.js";
import { bind } from "./keys.js";
import { state } from "./page_runs.js";

const STATES = { busy: "busy", down: "down" };
const kind = (name) => STATES[name] || (name.includes("weights") || name.includes("server") ? "wait-a" : "wait-b");

export function runTabs(run, here) {
  const tabs = [["Overview", address("run", run)], ["Episodes", address("run", run, "episodes")], ["Groups", address("run", run, "groups")], ["Failures", address("run", run, "failures")]];
  return h("nav", { class: "tabs", "aria-label": "Parts of the run" }, tabs.map(([name, to]) => link(to, { "aria-current": name === here ? "page" : null }, name)));
}

export async function render(visit) {
  const run = visit.params.run, activity = new Activity(), ledger = new Ledger(run);
  let drawn = "";
  await visit.follow(run, async (mark) => {
    const state = mark && `${mark.state} ${mark.step} ${mark.steps}`;
    if (mark && !mark.reopened && state === drawn) {
      ledger.read(visit);  // new groups change nothing else here
      return;
    }
    drawn = state;
    const data = await get(["runs", run]);
    if (visit.stale) return;
    visit.title(data.name, [[data.name, null]]);
    visit.show(page(visit, data));
    ledger.draw();
    ledger.read(visit);
    if (mark && !mark.reopened) activity.draw(run);
    else get(["runs", run, "events"]).then((events) => !visit.stale && activity.load(run, events)).catch(() => {});
  }, (lines) => activity.add(run, lines));
  bind({
    e: ["episodes", () => go(address("run", run, "episodes"))],
    f: ["failures", () => go(address("run", run, "failures"))],
    u: ["all runs", () => go("#/")],
  });
}

// The ledger's counts. A large ledger takes a while to count, so the counts are read for at most a thirtieth of the time.
class Ledger {
  constructor(run) {
    Object.assign(this, { run, counts: null, next: 0 });
  }

  async read(visit) {
    const began = performance.now();
    if (began < this.next) return;
    this.next = Infinity;
    this.counts = await get(["runs", this.run, "ledger"]).catch(() => this.counts);
    this.next = performance.now() + 30 * (performance.now() - began);
    if (!visit.stale) this.draw();
  }

  draw() {
    const slot = document.getElementById("ledger");
    if (slot && this.counts) slot.replaceChildren(ledgerTable(this.counts));
  }
}

function page(visit, data) {
  const open = (step) => go(address("run", data.id, "steps", step));
  return h("div", null,
    h("div", { class: "top" }, h("h1", { tabindex: "-1", "data-focus": true }, data.name), state(data.state), h("span", { class: "sub" }, facts(data.recipe))),
    runTabs(data.id, "Overview"),
    notes([...(data.summary.problems || []), ...data.notes]),
    tiles(data),
    rewardSection(data, open),
    data.alerts.length ? section("Alerts", null, h("ul", { class: "plain" }, data.alerts.slice(0, 12).map((alert) => h("li", null, link(address("run", data.id, "steps", alert.step), { class: "chip part" }, `step ${alert.step}`), " ", alert.text)))) : null,
    h("div", { id: "activity" }),
    partsSection(data),
    data.charts.length ? section("Curves", "Click a point to open its step.", h("div", { class: "multiples" }, data.charts.map((chart) => card(chart, open)))) : null,
    section("Ledger", "Every sampled token is trained, excluded or open.", h("div", { id: "ledger" }, h("p", { class: "wait" }, "Counting…"))),
    data.gate.length ? gate(data) : null,
    kinds(data),
    data.setbacks.length ? section("Rejected updates and excluded groups", "Newest first.", table([{ title: "Step", class: "num" }, { title: "What" }, { title: "Groups" }, { title: "Why" }], data.setbacks.map((one) => ({ cells: [number(one.step), `${one.what || ""}: ${one.action}`, one.groups.join(", "), one.reasons.join("; ")] })))) : null,
    sessions(data));
}

function facts(recipe) {
  return Object.entries(recipe).map(([name, value]) => `${name} ${value}`).join(" · ");
}

function tiles(data) {
  const last = data.reward.length ? data.reward[data.reward.length - 1][1] : null, { heldout_before: before, heldout_after: after } = data.summary;
  const items = [
    [data.steps ? `${data.step ?? 0} / ${data.steps}` : number(data.step), "learner steps"],
    [number(last, 3), "mean training reward, last step"],
    after ? [`${percent(before && before.value)} → ${percent(after.value)}`, `held-out, n = ${after.n}`] : before ? [percent(before.value), `held-out before training, n = ${before.n}`] : null,
    data.left_s !== null ? [duration(data.left_s), "remaining, at the pace of the newest steps"] : null,
    data.summary.tokens_trained ? [count(data.summary.tokens_trained), "tokens trained"] : null,
    data.summary.wall_s ? [duration(Object.values(data.summary.wall_s).reduce((sum, value) => sum + value, 0)), "wall time"] : null,
    data.summary.attempts_failed ? [number(data.summary.attempts_failed), "attempts ended by faults"] : null,
  ];
  return h("div", { class: "tiles" }, items.filter(Boolean).map(([value, label]) => h("div", { class: "tile" }, h("b", null, value), h("span", null, label))));
}

function rewardSection(data, open) {
  if (!data.reward.length) return section("Reward by step", null, h("p", { class: "empty" }, "No step has finished yet."));
  const falls = data.drops.length ? h("p", { class: "falls" }, "The reward fell most at: ", data.drops.slice(0, 6).map((drop) => [link(address("run", data.id, "steps", drop.step), { class: "chip bad", "data-drop": String(drop.step) }, `step ${drop.step}: ${number(drop.before, 3)} → ${number(drop.value, 3)}`), " "])) : null;
  return section("Reward by step", "Click a point to open its step, with its groups and the kinds of tasks whose scores changed.",
    h("div", { class: "card" }, lineChart(data.reward_chart.series, { ...data.reward_chart, width: Math.min(1100, Math.max(340, innerWidth - 60)), height: innerWidth < 720 ? 220 : 300, pick: open, flags: data.drops.map((drop) => drop.step) }), falls));
}

function card(chart, open) {
  return h("article", { class: "card" }, h("h3", null, chart.title), h("p", { class: "note" }, chart.note || " "), lineChart(chart.series, { ...chart, width: 360, pick: open }));
}

function partsSection(data) {
  const rows = data.parts.filter((part) => Object.keys(part.total).length);
  if (!rows.length) return null;
  const bar = (states, label) => stackedBar(Object.entries(states).sort(([a], [b]) => (a === "busy" ? -1 : b === "busy" ? 1 : a.localeCompare(b))).map(([name, value]) => ({ label: name, value, style: kind(name) })), label);
  return section("Parts", "Which parts worked and which waited, in the newest step and over the run.",
    table([{ title: "Part" }, { title: "Newest step" }, { title: "Whole run" }, { title: "Busy", class: "num" }, { title: "Waited most for" }], rows.map((part) => {
      const total = Object.values(part.total).reduce((sum, value) => sum + value, 0) || 1;
      const waits = Object.entries(part.total).filter(([name]) => name !== "busy").sort((a, b) => b[1] - a[1]);
      return { cells: [h("b", null, part.part), bar(part.newest, `${part.part}, newest step`), bar(part.total, `${part.part}, whole run`), percent((part.total.busy || 0) / total, 0), waits.length ? `${waits[0][0].replace("waiting for ", "")} (${duration(waits[0][1])})` : "–"] };
    }), { class: "parts" }));
}

function ledgerTable(ledger) {
  if (!ledger.counts) return notes([ledger.problem]);
  const counts = ledger.counts, states = Object.entries(counts.groups);
  return h("div", { class: "card" },
    h("p", null, h("b", null, number(counts.tokens_sampled)), " tokens sampled = ", h("b", null, number(counts.tokens_trained)), " trained + ", h("b", null, number(counts.tokens_excluded)), " excluded + ", h("b", null, number(counts.tokens_open)), " open"),
    h("p", null, states.map(([name, value]) => [chip(`${number(value)} ${name}`, name === "trained" ? "good" : ""), " "]), "groups"),
    Object.entries(counts.unused).length ? h("p", { class: "sub" }, "Not trained: ", Object.entries(counts.unused).map(([name, value]) => `${number(value)} × ${name}`).join(", ")) : null,
    counts.parts_pending ? h("p", { class: "sub" }, `${number(counts.parts_pending)} parts of late scores have not arrived`) : null);
}

function gate(data) {
  return section("Gate", "Versions on the suite of cases, newest first.", table([{ title: "Version" }, { title: "Verdict" }, { title: "pass@1 [95% interval]" }, { title: "Why" }],
    data.gate.map((row) => ({ cells: [link(address("run", data.id, "gate", row.version), null, `version ${row.version}`), chip(row.outcome || "–", row.outcome === "promoted" ? "good" : row.outcome === "blocked" || row.outcome === "rolled back" ? "bad" : ""), row.pass_at_1 === undefined ? "–" : `${percent(row.pass_at_1)} [${percent(row.low)} – ${percent(row.high)}]`, row.reason || ""] }))));
}

function kinds(data) {
  const after = (data.summary.by_kind && data.summary.by_kind.after) || {}, before = (data.summary.by_kind && data.summary.by_kind.before) || {};
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].sort();
  if (!names.length) return null;
  const cell = (rate) => (rate ? `${percent(rate.value)} [${percent(rate.ci_low)} – ${percent(rate.ci_high)}]` : "–");
  return section("Held-out success by kind", "With 95% intervals.", table([{ title: "Kind" }, { title: "Before" }, { title: "After" }, { title: "n", class: "num" }], names.map((name) => ({ cells: [link(`${address("run", data.id, "episodes")}?kind=${encodeURIComponent(name)}`, null, name), cell(before[name]), cell(after[name]), number((after[name] || before[name]).n)] }))));
}

function sessions(data) {
  if (data.sessions.length < 2 && !data.sessions.some((one) => one.why)) return null;
  return section("Sessions", "Each start of the run, and how it ended.", table([{ title: "Started" }, { title: "At step", class: "num" }, { title: "Ended" }, { title: "Why" }], data.sessions.map((one) => ({ cells: [one.began, number(one.step), one.ended, one.why] }))));
}

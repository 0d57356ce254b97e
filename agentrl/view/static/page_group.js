// A group: its attempts side by side, their scores and advantages, and why it has no signal. And the list of the newest groups.

import { address, go } from "./app.js";
import { get } from "./api.js";
import { chip, h, link, notes, section } from "./dom.js";
import { duration, number, signed } from "./format.js";
import { bind } from "./keys.js";
import { runTabs } from "./page_run.js";
import { OUTCOME_STYLES, groupsTable, pager } from "./page_step.js";
import { pre } from "./text.js";

export async function renderList(visit) {
  const run = visit.params.run, before = visit.query.get("before");
  await visit.follow(run, async (mark) => {
    if (mark && before) return;
    const data = await get(["runs", run, "groups"], { before });
    if (visit.stale) return;
    visit.title("Groups", [[run, address("run", run)], ["groups", null]]);
    visit.show(h("div", null, h("h1", { tabindex: "-1", "data-focus": true }, run), runTabs(run, "Groups"), notes(data.notes),
      section("Groups", "Groups in any state, newest first. A ready group waits for a learner step.", data.groups.length ? groupsTable(run, data.groups) : data.is_unreadable ? null : h("p", { class: "empty" }, "No group is stored yet.")),
      data.next === null ? null : h("p", null, link(`${address("run", run, "groups")}?before=${data.next}`, { class: "button" }, "Older groups"))));
  });
  bind({ u: ["the run", () => go(address("run", run))] });
}

export async function render(visit) {
  const { run, group } = visit.params;
  await visit.follow(run, async (mark) => {
    if (mark && visit.complete) return;
    const data = await get(["runs", run, "groups", group]);
    if (visit.stale) return;
    visit.complete = data.state === "trained" || data.state === "excluded";
    const step = data.step === null ? null : address("run", run, "steps", data.step);
    visit.title(`Group ${group}`, [[run, address("run", run)], ...(step ? [[`step ${data.step}`, step]] : [["groups", address("run", run, "groups")]]), [`group ${group}`, null]]);
    visit.show(page(run, data));
    const to = (other) => other !== null && go(address("run", run, "groups", other));
    bind({
      j: ["next group", () => to(data.neighbours.next)],
      k: ["previous group", () => to(data.neighbours.previous)],
      u: ["up: the step", () => go(step || address("run", run))],
    });
  });
}

function page(run, data) {
  const largest = Math.max(1e-9, ...data.attempts.map((one) => Math.abs(one.advantage || 0)));
  return h("div", null,
    h("div", { class: "top" }, h("h1", { tabindex: "-1", "data-focus": true }, `Group ${data.group}`), chip(data.state, data.state === "trained" ? "good" : ""), data.kind ? chip(data.kind) : null, h("span", { class: "grow" }), pager((other) => address("run", run, "groups", other), { previous: data.neighbours.previous, next: data.neighbours.next })),
    h("p", { class: "sub" }, `Task ${data.task}`, data.step === null ? " · not yet assigned to a learner step" : [data.state === "trained" ? " · trained by " : " · in ", link(address("run", run, "steps", data.step), null, `step ${data.step}`)], data.oldest_version === null ? "" : ` · oldest weights: version ${data.oldest_version}`),
    notes([...(data.problem ? [data.problem] : []), ...(data.fault ? [`Task fault: ${data.fault}`] : []), ...data.notes]),
    signal(data),
    h("div", { class: "attempts" }, data.attempts.map((one) => attempt(run, data, one, largest))),
    data.cancelled.length ? section("Cancelled attempts", null, h("ul", { class: "plain" }, data.cancelled.map((one) => h("li", null, `${one.episode}: ${one.begun ? `after ${one.turns} turns, ${one.tokens} tokens` : "not started"}; ${one.reason}`)))) : null,
    data.question ? section("Task", "The prompt of the first turn.", pre(data.question, "prompt")) : null);
}

function signal(data) {
  const counted = data.scores.filter((score) => score.value !== null && !score.excluded).map((score) => score.value);
  const different = new Set(counted).size > 1;
  const text = data.explanation || (different ? `Scores differ, so the group has a signal: attempts above the mean ${number(data.mean, 3)} become more likely, and those below it less likely.` : "");
  if (!text) return null;
  return h("div", { class: `signal ${data.explanation ? "none" : "some"}` }, h("b", null, data.explanation ? "No signal" : "Signal"), h("span", null, text));
}

function bar(value, largest) {
  const width = `${(50 * Math.abs(value || 0)) / largest}%`;
  return h("span", { class: "diverging", "aria-hidden": "true" }, h("i", { class: value < 0 ? "down" : "up", style: { width, [value < 0 ? "right" : "left"]: "50%" } }));
}

function attempt(run, data, one, largest) {
  const to = address("run", run, "groups", data.group, one.attempt), score = one.score;
  const rows = [
    ["advantage", one.advantage === null ? "–" : [signed(one.advantage), bar(one.advantage, largest)]],
    ["answer", one.answer === null ? "none" : one.answer],
    ["ended", one.stop || "–"],
    ["turns", `${one.turns}${one.trajectories > 1 ? ` in ${one.trajectories} contexts` : ""}`],
    ["tokens", `${number(one.tokens)}${one.trained ? "" : ", not trained"}`],
    ["tools", Object.entries(one.tools).map(([name, times]) => `${name} ${times}`).join(", ") || "none"],
    one.failed_calls ? ["failed calls", number(one.failed_calls)] : null,
    ["time", duration(one.wall_s)],
    ["versions", one.versions.map((version) => `v${version}`).join(", ") || "–"],
  ];
  const parts = Object.entries(score.parts);
  return h("article", { class: `card attempt ${one.excluded ? "excluded" : ""}` },
    h("h3", null, link(to, { class: "name", "data-attempt": String(one.attempt) }, `attempt ${one.attempt}`), h("span", { class: `score ${OUTCOME_STYLES[one.outcome] || ""}` }, score.pending.length ? "pending" : score.value === null ? "no score" : number(score.value, 3))),
    one.excluded ? h("p", { class: "sub bad" }, "excluded from loss and baseline") : null,
    score.reason ? h("p", { class: "sub" }, score.reason) : null,
    h("dl", null, rows.filter(Boolean).map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
    parts.length > 1 ? h("dl", { class: "score-parts" }, parts.map(([name, value]) => [h("dt", null, name), h("dd", null, number(value, 3))])) : null,
    score.evidence ? h("p", { class: "evidence" }, score.evidence) : null,
    one.failures.map((failure) => h("p", { class: "sub bad" }, `${failure.blame}: ${failure.kind}: ${failure.message}`)));
}

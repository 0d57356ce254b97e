// What happens in a run, newest first: notable events, and the last episodes while it trains.

import { address } from "./app.js";
import { chip, h, link, notes, replace, section } from "./dom.js";
import { duration, number, percent } from "./format.js";

const MOST = 40, NOTABLE = new Set(["alert", "part_restarted", "version_judged", "evaluation"]);

function episodeLink(run, id) {
  const trained = /^g(\d+)-(\d+)-a\d+$/.exec(id);
  if (trained) return link(address("run", run, "groups", Number(trained[1]), Number(trained[2])), null, id);
  return link(address("run", run, "evaluated", id), null, id);
}

const LINES = {
  run_started: (run, one) => [chip("start"), ` ${one.recipe}, ${one.steps || "unlimited"} steps`],
  stage: (run, one) => [chip("stage"), ` ${one.stage} ${one.detail}`],
  episode_started: (run, one) => [episodeLink(run, one.episode), ` starts: ${one.kind} ${one.task_id}`],
  turn: (run, one) => [episodeLink(run, one.episode), ` turn ${one.turn}: ${one.sampled_tokens} tokens in ${duration(one.seconds)}`, one.calls.length ? `, calls ${one.calls.join(", ")}` : "", one.text ? h("span", { class: "quiet" }, ` ${one.text.slice(0, 120)}`) : null],
  tool: (run, one) => [episodeLink(run, one.episode), ` ${one.tool} `, one.ok ? "" : chip("failed", "bad"), ` ${duration(one.seconds)}`, h("span", { class: "quiet" }, ` ${one.output.slice(0, 120)}`)],
  episode_ended: (run, one) => [episodeLink(run, one.episode), ` ended: ${one.stop_reason}, ${one.turns} turns, ${one.tokens} tokens`, one.failure ? [" ", chip(`${one.blame}: ${one.failure}`, "bad")] : null],
  episode_scored: (run, one) => [episodeLink(run, one.episode), " ", one.score === null ? chip(one.pending ? "waits for a score" : one.reason || "no score") : chip(`score ${number(one.score, 3)}`)],
  group: (run, one) => [link(address("run", run, "groups", one.group), null, `group ${one.group}`), ` ${one.kind}: ${one.scores.map((score) => (score === null ? "–" : number(score, 2))).join(" ")}`],
  version_served: (run, one) => [chip(`version ${one.version}`, "good"), ` is serving, after a stall of ${duration(one.stall_s)}`],
  step: (run, one) => [link(address("run", run, "steps", one.step), { class: "chip good" }, `step ${one.step}`), ` reward ${number(one.metrics.reward_mean ?? null, 3)}`],
  evaluation: (run, one) => [chip("evaluation"), ` ${one.phase}: ${Object.entries(one.rates).map(([split, rate]) => `${split} ${percent(rate[0])} [${percent(rate[1])} – ${percent(rate[2])}]`).join(", ")}`],
  version_judged: (run, one) => [chip(`gate: ${one.outcome}`, one.outcome === "promoted" ? "good" : "bad"), ` version ${one.version} ${one.reason}`],
  alert: (run, one) => [chip("alert", "bad"), ` ${one.text}`],
  part_restarted: (run, one) => [chip(`${one.part} restarted`, "bad"), ` ${one.text}`],
  dropped: (run, one) => [chip("dropped", "part"), ` ${number(one.count)} events were not recorded`],
};

function row(run, one) {
  const line = LINES[one.kind];
  return h("li", null, h("time", null, new Date(1000 * one.at).toLocaleTimeString()), " ", line ? line(run, one) : one.kind);
}

export class Activity {
  constructor() {
    this.newest = [];
    this.notable = [];
    this.problems = [];
  }

  load(run, data) {
    [this.newest, this.notable, this.problems] = [data.newest, data.notable, data.notes];
    this.draw(run);
  }

  add(run, lines) {
    const added = [...lines].reverse();
    this.newest = added.concat(this.newest).slice(0, MOST);
    this.notable = added.filter((one) => NOTABLE.has(one.kind)).concat(this.notable).slice(0, 200);
    this.draw(run);
  }

  draw(run) {
    const slot = document.getElementById("activity");
    if (!slot || (!this.newest.length && !this.problems.length)) return;
    const alerts = this.notable.filter((one) => NOTABLE.has(one.kind)).slice(0, 12);
    replace(slot, notes(this.problems),
      alerts.length ? section("Notable events", "Alerts, restarts, evaluations and verdicts, newest first.", h("ul", { class: "plain events" }, alerts.map((one) => row(run, one)))) : null,
      section("Activity", null, h("details", { class: "card" }, h("summary", null, "The newest events"), h("ul", { class: "plain events" }, this.newest.map((one) => row(run, one))))));
    const details = slot.querySelector("details");
    details.open = this.open ?? false;
    details.addEventListener("toggle", () => { this.open = details.open; });
  }
}

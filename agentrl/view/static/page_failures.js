// Captured failures: counts by tag, traces, clusters, the same task before and after, and operations on a trace.

import { address, go } from "./app.js";
import { get } from "./api.js";
import { chip, h, link, notes, replace, section, table } from "./dom.js";
import { number } from "./format.js";
import { bind } from "./keys.js";
import { operate } from "./operations.js";
import { body, text } from "./page_episode.js";
import { runTabs } from "./page_run.js";
import { pre } from "./text.js";

const FILTERS = ["tag", "kind", "phase", "why"];

export async function render(visit) {
  const run = visit.params.run, filters = Object.fromEntries(FILTERS.map((name) => [name, visit.query.get(name) || ""])), offset = Number(visit.query.get("offset") || 0);
  visit.title("Failures", [[run, address("run", run)], ["failures", null]]);
  const data = await get(["runs", run, "failures"], { ...filters, offset });
  if (visit.stale) return;
  const here = (changes) => {
    const query = new URLSearchParams(Object.entries({ ...filters, ...changes }).filter(([, value]) => value)).toString();
    return `${address("run", run, "failures")}${query ? `?${query}` : ""}`;
  };
  const choice = (name, values) => {
    const select = h("select", null, h("option", { value: "" }, "any"), values.map((value) => h("option", { value }, value)));
    select.value = filters[name];
    select.addEventListener("change", () => go(here({ [name]: select.value, offset: "" })));
    return h("label", null, h("span", null, name), select);
  };
  const tags = Object.entries(data.digest.tags), most = Math.max(1, ...tags.map(([, times]) => times)), clusters = h("div", null, h("button", { class: "button", type: "button", "data-clusters": true }, "Cluster similar failures"));
  clusters.querySelector("button").addEventListener("click", async (event) => {
    event.target.disabled = true;
    event.target.textContent = "Clustering…";
    try {
      replace(clusters, clusterTable(run, await get(["runs", run, "failures", "clusters"], filters)));
    } catch (error) {
      replace(clusters, notes([error.message, error.fix].filter(Boolean)));
    }
  });
  bind({ u: ["the run", () => go(address("run", run))] });
  visit.show(h("h1", { tabindex: "-1", "data-focus": true }, run), runTabs(run, "Failures"),
    section("Failures by tag", `${number(data.digest.failures)} failures in ${number(data.digest.episodes)} episodes; ${number(data.digest.kept)} traces stored, ${number(data.digest.dropped)} dropped.`,
      h("div", { class: "bars" }, tags.map(([tag, times]) => h("div", { class: "bar-row" }, link(here({ tag, offset: "" }), null, tag), h("span", { class: "bar" }, h("i", { style: { width: `${(100 * times) / most}%` } })), h("b", null, number(times)))))),
    overTime(data.digest),
    section("Clusters", "Failures with the same tools, errors and tags.", clusters),
    section("Traces", `${number(data.matching)} matching, newest first.`, h("div", { class: "filters" }, choice("tag", tags.map(([tag]) => tag)), choice("kind", Object.keys(data.kinds).filter(Boolean)), choice("phase", data.digest.phases.map((one) => one.phase)), choice("why", Object.keys(data.digest.why))),
      data.rows.length ? table([{ title: "Trace" }, { title: "Tag" }, { title: "Why" }, { title: "Phase" }, { title: "Step", class: "num" }, { title: "Kind" }, { title: "Score", class: "num" }, { title: "Question" }], data.rows.map((row) => ({ cells: [link(address("run", run, "failures", row.id), { class: "name" }, row.id), chip(row.tag || "–"), row.why, row.phase, number(row.step), row.kind, number(row.score, 3), h("span", { class: "ellipsis" }, row.question)] })), { class: "wide", label: "Traces" }) : h("p", { class: "empty" }, "No trace matches."),
      offset + data.rows.length < data.matching ? h("p", null, link(here({ offset: String(offset + data.rows.length) }), { class: "button" }, "Older traces")) : null));
}

function overTime(digest) {
  const rows = (digest.steps || []).map((one) => ({ ...one, failed: Object.values(one.tags).reduce((sum, times) => sum + times, 0) }));
  if (rows.length < 2) return null;
  const most = Math.max(...rows.map((row) => row.failed), 1);
  return section("Failures by step", "Among the training episodes of each step.", h("div", { class: "columns", role: "img", "aria-label": `Failures by step, from ${rows[0].failed} to ${rows[rows.length - 1].failed}` }, rows.slice(-120).map((row) => h("i", { style: { height: `${(100 * row.failed) / most}%` }, title: `step ${row.step + 1}: ${row.failed} of ${row.episodes} episodes failed` }))));
}

function clusterTable(run, data) {
  return table([{ title: "Failures", class: "num" }, { title: "Tags" }, { title: "What they share" }, { title: "Examples" }], data.clusters.map((one) => ({ cells: [number(one.count), one.tags.slice(0, 4).map(([tag, times]) => [chip(`${tag || "–"} ${times}`), " "]), one.about.join("; "), one.ids.slice(0, 3).map((id) => [link(address("run", run, "failures", id), null, id), " "])] })));
}

export async function renderTrace(visit) {
  const { run, trace } = visit.params, data = await get(["runs", run, "failures", trace]);
  if (visit.stale) return;
  visit.title(trace, [[run, address("run", run)], ["failures", address("run", run, "failures")], [trace, null]]);
  const source = /^g(\d+)-(\d+)-a\d+$/.exec(data.phase === "train" ? data.id : "");
  const again = () => renderTrace(visit).catch((error) => visit.fail(error));
  bind({ u: ["the failures", () => go(address("run", run, "failures"))] });
  visit.show(h("div", { class: "top" }, h("h1", { tabindex: "-1", "data-focus": true }, data.id), chip(data.tag || "no tag", "bad"), chip(data.why), data.score && data.score.value !== null ? chip(`score ${number(data.score.value, 3)}`) : null),
    h("p", { class: "sub" }, `${data.phase} · step ${data.step} · ${data.kind} · task ${data.task}`, source ? [" · ", link(address("run", run, "groups", Number(source[1]), Number(source[2])), null, "tokens and training")] : null),
    notes(data.missing),
    operations(run, data, again),
    data.tags.length ? h("p", null, "Tags: ", data.tags.map((tag) => [chip(`${tag.name} by ${tag.by}${tag.turn === null ? "" : `, turn ${tag.turn + 1}`}`), " "])) : null,
    data.prompt.length ? section("Task", data.truth ? "The truth is below; the agent never saw it." : null, data.prompt.map((message) => h("details", { class: "prompt-block", open: message.role === "user" }, h("summary", null, message.role), text(message.content, pre, "prompt"))), data.truth ? h("details", null, h("summary", null, "Truth"), text(data.truth, pre, "typed")) : null) : null,
    data.spoken.length ? section("Conversation", null, data.spoken.map((message) => h("article", { class: "turn" }, h("header", null, h("h3", null, message.role)), text(message.content, pre, "plain-text"), message.calls.length ? h("p", { class: "sub" }, `calls ${message.calls.join(", ")}`) : null))) : null,
    data.trajectories.length ? body({ ...data, turns: data.trajectories.reduce((sum, one) => sum + one.count, 0), offset: 0, files: [], removed: [], memory: null }, {}) : null,
    elsewhere(data));
}

export async function renderVerdict(visit) {
  const { run, version } = visit.params, data = await get(["runs", run, "gate", version]);
  if (visit.stale) return;
  visit.title(`Version ${version} at the gate`, [[run, address("run", run)], [`gate: version ${version}`, null]]);
  bind({ u: ["the run", () => go(address("run", run))] });
  visit.show(h("div", { class: "top" }, h("h1", { tabindex: "-1", "data-focus": true }, `Version ${version} at the gate`), chip(data.outcome, data.outcome === "promoted" || data.outcome === "reference" ? "good" : "bad")),
    h("p", { class: "sub" }, data.reason),
    data.cases.length ? data.cases.map((one) => section(`Case ${one.case}`, one.turn === null ? null : `The first difference is at turn ${one.turn}.`, h("div", { class: "attempts" }, [one.before, one.after].map((shown) => (shown ? transcript(shown) : h("article", { class: "card" }, h("p", { class: "sub" }, "the transcript is not stored"))))))) : h("p", { class: "empty" }, "No case regressed."),
    data.more ? notes([`${data.more} more cases regressed`]) : null);
}

function elsewhere(data) {
  if (!data.elsewhere.length) return null;
  return section("The same task elsewhere", "Transcripts of the task from the run: before, during and after training.", h("div", { class: "attempts" }, data.elsewhere.map(transcript)));
}

function transcript(one) {
  const score = h("span", { class: "score" }, one.score === null ? "no score" : number(one.score, 3));
  return h("article", { class: "card" }, h("h3", null, one.phase, one.step === null ? "" : ` (step ${one.step})`, score), h("p", { class: "sub" }, `answer: ${one.answer || "none"}`),
    h("details", null, h("summary", null, `${one.messages.length} messages`), one.messages.map((message) => h("div", { class: "message" }, h("b", null, message.role), message.content ? pre(message.content, "plain-text") : null, message.calls.map((call) => pre(`${call.name} ${call.arguments}`, "typed"))))));
}

// Asks before it sends an operation, and shows its result.
function operations(run, data, done) {
  const result = h("p", { class: "sub", role: "status" });
  const send = async (name, fields, what) => {
    const answer = await operate(run, name, fields, what, result);
    if (answer && name === "tag") done();
  };
  const input = (label, attributes) => h("input", { ...attributes, "aria-label": label, placeholder: label });
  const tag = input("tag, such as misread_output", { pattern: "[a-z][a-z0-9_]*", required: true, size: "26" }), turn = input("turn", { type: "number", min: "1", class: "short" }), suite = input("folder of a suite", { required: true, size: "26", value: "evals/from-view" });
  const form = (fields, label, submit) => h("form", { class: "inline", onsubmit: (event) => { event.preventDefault(); submit(); } }, fields, h("button", { class: "button", type: "submit" }, label));
  return h("div", { class: "card operations" },
    form([tag, turn], "Tag", () => send("tag", { trace: data.id, tag: tag.value, turn: turn.value ? Number(turn.value) : null, note: "" }, `Tag ${data.id} as ${tag.value}. Your tag takes precedence over rules and judges.`)),
    data.trajectories.length ? h("div", { class: "inline" }, h("span", null, "The answer is"), ["right", "wrong"].map((label) => h("button", { class: "button", type: "button", onclick: () => send("label", { trace: data.id, label }, `Label the answer of ${data.id} as ${label}. Labels calibrate judges.`) }, label))) : null,
    data.why === "fault" || !data.trajectories.length ? null : form([suite], "Promote to a case", () => send("promote", { trace: data.id, suite: suite.value, note: "from agentrl view" }, `Write the task of ${data.id} as a case to ${suite.value}. A gate on this suite does not promote versions that fail the case.`)),
    result);
}

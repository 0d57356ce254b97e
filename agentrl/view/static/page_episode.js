// An episode: the tree of its contexts, turns with tool calls and output, files, evidence and timings.

import { address, go } from "./app.js";
import { get } from "./api.js";
import { chip, h, link, notes, section } from "./dom.js";
import { duration, number, signed } from "./format.js";
import { bind } from "./keys.js";
import { operate } from "./operations.js";
import { OUTCOME_STYLES, dots } from "./page_step.js";
import { code, looksLikeMarkdown, markdown, plain, pre } from "./text.js";

const CODE = new Set(["code", "command", "cmd", "script", "source", "sql", "query"]);
const LONG = 2500;

export async function render(visit) {
  const { run, group, attempt } = visit.params, offset = Number(visit.query.get("offset") || 0);
  const [data, lines] = await Promise.all([get(["runs", run, "groups", group, attempt], { offset }), get(["runs", run, "groups", group])]);
  if (visit.stale) return;
  const to = (other) => address("run", run, "groups", group, other), step = data.step === null ? null : address("run", run, "steps", data.step);
  visit.title(`Group ${group}, attempt ${attempt}`, [[run, address("run", run)], ...(step ? [[`step ${data.step}`, step]] : []), [`group ${group}`, address("run", run, "groups", group)], [`attempt ${attempt}`, null]]);
  const number_ = Number(attempt);
  const neighbour = (by) => {
    const next = number_ + by;
    if (next >= 0 && next < data.attempts) go(to(next));
    else if (by > 0 && lines.neighbours.next !== null) go(address("run", run, "groups", lines.neighbours.next, 0));
    else if (by < 0 && lines.neighbours.previous !== null) go(address("run", run, "groups", lines.neighbours.previous));
  };
  visit.show(h("div", null,
    head(`Group ${group}, attempt ${attempt}`, data, h("span", { class: "pager" },
      h("button", { class: "button", type: "button", onclick: () => neighbour(-1), disabled: number_ === 0 && lines.neighbours.previous === null }, "← previous"),
      h("button", { class: "button", type: "button", onclick: () => neighbour(1), disabled: number_ + 1 >= data.attempts && lines.neighbours.next === null }, "next →"))),
    h("p", { class: "siblings" }, "Attempts of the group: ", dots(run, lines, number_)),
    body(data, { tokens: (trajectory, turn) => address("run", run, "groups", group, attempt, trajectory, turn), more: (next) => `${to(attempt)}?offset=${next}` })));
  const turns = [...document.querySelectorAll(".turn")];
  bind({
    j: ["next episode", () => neighbour(1)],
    k: ["previous episode", () => neighbour(-1)],
    n: ["next turn", () => focusTurn(turns, 1)],
    p: ["previous turn", () => focusTurn(turns, -1)],
    t: ["tokens of the turn", () => openTokens(turns)],
    u: ["up: the group", () => go(address("run", run, "groups", group))],
  });
}

export async function renderEvaluated(visit) {
  const { run, episode } = visit.params, data = await get(["runs", run, "evaluated", episode]);
  if (visit.stale) return;
  visit.title(`Episode ${episode}`, [[run, address("run", run)], ["episodes", address("run", run, "episodes")], [episode, null]]);
  visit.show(h("div", null, head(`Episode ${episode}`, data, null), data.question ? h("details", { open: true }, h("summary", null, "Task"), pre(data.question, "prompt")) : null, body(data, {})));
  const turns = [...document.querySelectorAll(".turn")];
  bind({ n: ["next turn", () => focusTurn(turns, 1)], p: ["previous turn", () => focusTurn(turns, -1)], u: ["up: the episodes", () => go(address("run", run, "episodes"))] });
}

function focusTurn(turns, by) {
  const at = turns.indexOf(document.activeElement.closest ? document.activeElement.closest(".turn") : null);
  const next = turns[Math.max(0, Math.min(turns.length - 1, at < 0 ? (by > 0 ? 0 : turns.length - 1) : at + by))];
  if (next) next.focus();
}

function openTokens(turns) {
  const focused = document.activeElement.closest ? document.activeElement.closest(".turn") : null, turn = focused || turns[0];
  const target = turn && turn.querySelector("a.tokens-link");
  if (target) go(target.getAttribute("href"));
}

function head(title, data, pager) {
  const score = data.score.value;
  return [
    h("div", { class: "top" }, h("h1", { tabindex: "-1", "data-focus": true }, title), chip(data.score.pending.length ? "waits for a score" : score === null ? "no score" : `score ${number(score, 3)}`, OUTCOME_STYLES[data.outcome] || ""), data.advantage === null || data.advantage === undefined ? null : chip(`advantage ${signed(data.advantage)}`, data.advantage > 0 ? "good" : data.advantage < 0 ? "bad" : ""), data.excluded ? chip("excluded", "bad") : null, data.kind ? chip(data.kind) : null, h("span", { class: "grow" }), pager),
    h("p", { class: "sub" }, [data.task && `task ${data.task}`, `${data.turns} turns`, `${number(data.tokens)} tokens`, duration(data.wall_s), data.sandbox_s ? `sandbox ${duration(data.sandbox_s)}` : null, data.stop && `ended: ${data.stop}`, data.retries ? `${data.retries} earlier attempts failed` : null].filter(Boolean).join(" · ")),
    notes([...(data.reason ? [data.reason] : []), ...data.notes]),
  ];
}

export function body(data, links) {
  const multiple = data.trajectories.length > 1;
  const children = (parent, turn) => data.trajectories.filter((one) => one.parent && one.parent.trajectory === parent && one.parent.turn === turn);
  const later = data.offset + data.trajectories.reduce((sum, one) => sum + one.turns.length, 0);
  return h("div", { class: multiple ? "with-outline" : "" },
    multiple ? outline(data) : null,
    h("div", null,
      data.trajectories.map((one) => context(data, one, links, children, multiple)),
      later < data.turns && links.more ? h("p", null, link(links.more(later), { class: "button" }, `Turns from ${later + 1} on`)) : null,
      outcome(data)));
}

function outline(data) {
  const depth = (one) => (one.parent ? 1 + depth(data.trajectories[one.parent.trajectory]) : 0);
  return h("nav", { class: "outline", "aria-label": "Contexts of the episode" }, h("h2", null, "Contexts"), h("ol", null, data.trajectories.map((one) => h("li", { style: { "padding-left": `${depth(one) * 14}px` } },
    h("button", { type: "button", class: "linklike", onclick: () => { const target = document.getElementById(`context-${one.trajectory}`); target.scrollIntoView(); target.focus(); } }, `${one.trajectory} ${one.agent}`), h("small", null, ` ${one.count} turns, ${one.stop || "continues"}`)))));
}

function context(data, one, links, children, multiple) {
  const from = one.parent ? (one.parent.call === null ? `continues turn ${one.parent.turn} of context ${one.parent.trajectory}` : `started by call ${one.parent.call} of turn ${one.parent.turn} in context ${one.parent.trajectory}`) : "";
  const first = one.turns.find((turn) => turn.prompt);
  return h("section", { class: "context", id: `context-${one.trajectory}`, tabindex: "-1", "aria-label": `Context ${one.trajectory}, ${one.agent}` },
    multiple ? h("h2", null, `Context ${one.trajectory}: ${one.agent}`, h("small", null, [from, one.inherited ? `${one.inherited} turns shared with another attempt` : "", one.stop].filter(Boolean).join(" · "))) : null,
    one.prompt.map((message) => folded(`${message.role} prompt`, message.content)),
    !one.prompt.length && first ? h("details", { class: "prompt-block", open: !multiple && one.trajectory === 0 }, h("summary", null, `Prompt, ${number(first.prompt_tokens)} tokens, as the policy read it`), text(first.prompt, pre, "prompt")) : null,
    one.turns.map((turn) => turnCard(one, turn, links, children(one.trajectory, turn.turn))));
}

function folded(title, content) {
  return h("details", { class: "prompt-block" }, h("summary", null, title), text(content, pre, "prompt"));
}

// A text with a note on what was cut off; a long one is folded.
export function text(content, layout, name) {
  const shown = plain(content.text), cut = content.cut ? h("p", { class: "cut" }, `${number(content.cut)} more characters are not shown`) : null;
  if (shown.length <= LONG) return [layout(content.text, name), cut];
  const slot = h("div", null, layout(`${content.text.slice(0, LONG)}`, name));
  const button = h("button", { class: "linklike", type: "button" }, `show all ${number(shown.length)} characters`);
  button.addEventListener("click", () => {
    slot.replaceChildren(layout(content.text, name));
    button.remove();
  });
  return [slot, h("p", { class: "cut" }, button), cut];
}

function turnCard(one, turn, links, started) {
  const to = links.tokens ? links.tokens(one.trajectory, turn.turn) : null;
  const facts = [`${turn.tokens} tokens`, turn.forced ? `${turn.forced} inserted` : null, turn.generate_s === null ? null : `sampled in ${duration(turn.generate_s)}`, turn.tool_s ? `tools ${duration(turn.tool_s)}` : null, turn.versions.length ? turn.versions.map((span) => `v${span.version}`).join(" → ") : null, turn.logprob_mean === null ? null : `mean logprob ${number(turn.logprob_mean, 3)}`, turn.finish === "stop" ? null : `ended by ${turn.finish}`].filter(Boolean).join(" · ");
  const trained = turn.trained_tokens === null ? null : turn.trained_tokens ? chip(turn.advantage === null ? "trained" : `advantage ${signed(turn.advantage)}`, turn.advantage > 0 ? "good" : turn.advantage < 0 ? "bad" : "") : chip("context only: not trained here");
  return h("article", { class: "turn", tabindex: "0", "aria-label": `Turn ${turn.turn}` },
    h("header", null, h("h3", null, `Turn ${turn.turn}`), h("span", { class: "facts" }, facts), turn.reward === null || turn.reward === undefined ? null : chip(`reward ${signed(turn.reward)}`, turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : ""), trained, to ? link(to, { class: "tokens-link", "data-turn": `${one.trajectory}.${turn.turn}` }, "tokens →") : null),
    turn.content.text.trim() ? h("div", { class: "message" }, text(turn.content, (shown) => (looksLikeMarkdown(shown) ? markdown(shown) : pre(shown, "plain-text")))) : null,
    turn.calls.map((call, n) => callCard(call, turn.results[n], started.filter((child) => child.parent.call === n))),
    turn.results.slice(turn.calls.length).map((result) => output(result)),
    started.filter((child) => child.parent.call === null).map((child) => h("p", { class: "sub" }, `The agent continues in context ${child.trajectory}.`)));
}

function callCard(call, result, children) {
  const single = call.arguments.length === 1 && call.arguments[0].is_text && CODE.has(call.arguments[0].name);
  return h("div", { class: "call" },
    h("p", { class: "call-name" }, h("b", null, call.name), single ? null : h("span", { class: "sub" }, call.arguments.length ? "" : " without arguments")),
    single ? text(call.arguments[0].value, (shown) => code(shown, call.arguments[0].name === "command" || call.arguments[0].name === "cmd" ? "sh" : call.name === "python" ? "python" : ""))
      : call.arguments.length ? h("dl", { class: "arguments" }, call.arguments.map((one) => [h("dt", null, one.name), h("dd", null, text(one.value, CODE.has(one.name) || !one.is_text ? (shown) => code(shown, one.is_text ? "" : "json") : (shown) => pre(shown, "plain-text")))])) : null,
    children.map((child) => h("p", { class: "sub" }, `The call started context ${child.trajectory}, agent ${child.agent}.`)),
    result ? output(result) : h("p", { class: "sub" }, "no result"));
}

function output(result) {
  return h("div", { class: `output ${result.ok ? "" : "failed"}` }, h("p", { class: "output-head" }, result.ok ? "output" : "failed", result.wall_s ? ` · ${duration(result.wall_s)}` : "", result.reward === null || result.reward === undefined ? "" : ` · reward ${signed(result.reward)}`), result.output.text ? text(result.output, pre, "typed") : h("p", { class: "sub" }, "empty"));
}

// A form that sends a part of the score that the run waits for.
function scoreForm(data, part) {
  const value = h("input", { type: "number", step: "any", min: String(part.low), max: String(part.high), required: true, class: "short", "aria-label": `${part.name}, from ${part.low} to ${part.high}` });
  const result = h("span", { class: "sub", role: "status" });
  const send = (event) => {
    event.preventDefault();
    operate(data.run, "score", { episode_id: data.episode, part: part.name, value: Number(value.value) }, `Score ${part.name} of ${data.episode} with ${value.value}. The group is trained once all its scores have arrived.`, result);
  };
  return h("form", { class: "inline", onsubmit: send }, h("b", null, part.name), `${part.low} to ${part.high}`, value, h("button", { class: "button", type: "submit" }, "Send score"), result);
}

function outcome(data) {
  const score = data.score, parts = Object.entries(score.parts);
  return section("Outcome", null, h("div", { class: "card" },
    h("dl", { class: "facts-list" },
      h("dt", null, "answer"), h("dd", null, data.answer ? text(data.answer, pre, "typed") : "none"),
      h("dt", null, "score"), h("dd", null, score.value === null ? score.reason || "none" : number(score.value)),
      parts.map(([name, value]) => [h("dt", null, name), h("dd", null, number(value))]),
      score.pending.map((part) => [h("dt", null, "waits for"), h("dd", null, scoreForm(data, part))]),
      score.evidence ? [h("dt", null, "evidence"), h("dd", null, pre(score.evidence, "typed"))] : null),
    data.failures.map((failure) => h("p", { class: "failure" }, chip(`${failure.blame} · ${failure.stage}`, "bad"), " ", h("b", null, failure.kind), failure.turn === null ? "" : ` after turn ${failure.turn}`, pre(failure.message, "typed"))),
    data.files && data.files.length ? h("div", null, h("h3", null, "Output files"), data.files.map((file) => h("details", null, h("summary", null, `${file.path}, ${number(file.bytes)} bytes`), file.is_text ? text(file.content, pre, "typed") : h("p", { class: "sub" }, "not text")))) : null,
    data.removed && data.removed.length ? h("p", { class: "sub" }, `Removed files: ${data.removed.join(", ")}`) : null,
    data.memory ? h("div", null, h("h3", null, `Notes in memory (${data.memory.scope})`), data.memory.notes.map((note) => h("div", null, text(note, pre, "typed"))), data.memory.read.length ? h("p", { class: "sub" }, `The episode read the notes of ${data.memory.read.join(", ")}`) : null) : null));
}

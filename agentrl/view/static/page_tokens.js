// The tokens of a turn: what was sampled with which logprob, by which version, and what the learner did with it.

import { address, go } from "./app.js";
import { get } from "./api.js";
import { chip, h, link, notes, replace, section, table } from "./dom.js";
import { number, percent, signed } from "./format.js";
import { bind } from "./keys.js";
import { plain, pre } from "./text.js";

// Name, what it shows, and the value of token `n` between -1 and 1 for its colour.
const LENSES = {
  push: ["Push", "advantage × (1 − probability): how far the update pushes the token; green: up, red: down, hatched: masked, framed: clipped, so no gradient", (data, n, scale, largest) => (push(data, n) === null ? null : push(data, n) / largest)],
  trained: ["Advantage", "green: made more likely, red: less likely, hatched: masked, not trained", (data, n, scale) => (data.mask && !data.mask[n] ? null : (at(data.advantages, n) || 0) / scale)],
  logprob: ["Surprise", "dark: the token was unlikely when it was sampled", (data, n) => -Math.min(1, -(data.logprobs[n] || 0) / 3)],
  ratio: ["Ratio", "green: more likely under the learner's weights than when sampled, red: less likely", (data, n) => (at(data.new_logprobs, n) === null ? null : Math.max(-1, Math.min(1, (data.new_logprobs[n] - data.logprobs[n]) / 0.2)))],
  entropy: ["Entropy", "dark: the learner's policy was uncertain", (data, n) => (at(data.entropies, n) === null ? null : -Math.min(1, data.entropies[n] / 2))],
  version: ["Version", "the weights that sampled the token", (data, n) => (versionOf(data, n) % 2 ? -0.35 : 0.35)],
};

// The gradient of the surrogate by the token's own logit, without the importance weight: zero if the ratio is clipped.
function push(data, n) {
  if (!data.mask || !data.advantages || !data.mask[n]) return null;
  if (at(data.clipped, n)) return 0;
  const logprob = at(data.new_logprobs, n) ?? data.logprobs[n];
  return logprob === null ? null : data.advantages[n] * (1 - Math.exp(logprob));
}

const at = (column, n) => (column && column[n] !== undefined ? column[n] : null);
const versionOf = (data, n) => (data.versions.find((span) => n >= span.start && n < span.end) || { version: -1 }).version;

export async function render(visit) {
  const { run, group, attempt, trajectory, turn } = visit.params, offset = Number(visit.query.get("offset") || 0);
  const data = await get(["runs", run, "groups", group, attempt, trajectory, turn], { offset });
  if (visit.stale) return;
  const episode = address("run", run, "groups", group, attempt);
  visit.title(`Tokens of turn ${turn}`, [[run, address("run", run)], ...(data.step === null ? [] : [[`step ${data.step}`, address("run", run, "steps", data.step)]]), [`group ${group}`, address("run", run, "groups", group)], [`attempt ${attempt}`, episode], [`turn ${trajectory}.${turn}`, null]]);
  const to = (other) => address("run", run, "groups", group, attempt, trajectory, other), number_ = Number(turn);
  const detail = h("aside", { class: "token-detail card", "aria-live": "polite", "aria-label": "Selected token" }), stream = h("div", { class: "tokens", role: "listbox", "aria-label": "Sampled tokens. Arrow keys move.", tabindex: "0" });
  const lens = h("div", { class: "lenses", role: "group", "aria-label": "What the colours show" }), key = h("p", { class: "sub" });
  const state = { selected: Math.min(data.ids.length - 1, Number(visit.query.get("token") || -1)), lens: data.advantages ? "push" : "logprob" };
  const elements = data.ids.map((id, n) => tokenElement(data, n, () => select(n)));
  const largest = Math.max(1e-9, ...data.ids.map((_, n) => Math.abs(push(data, n) || 0)));
  const scale = Math.max(1e-9, ...(data.advantages || data.rewards || [0]).map((value) => Math.abs(value || 0)));

  const paint = () => {
    const [, text, value] = LENSES[state.lens];
    key.textContent = text;
    elements.forEach((element, n) => {
      const shade = value(data, n, scale, largest), masked = data.mask && !data.mask[n];
      element.className = `token${masked ? " masked" : ""}${data.forced.includes(n) ? " forced" : ""}${at(data.clipped, n) ? " clipped" : ""}${shade === null ? "" : shade > 0 ? " up" : " down"}${data.special.includes(n) ? " special" : ""}${state.lens === "logprob" || state.lens === "entropy" ? " heat" : ""}`;
      element.style.setProperty("--shade", shade === null ? "0" : String(Math.round(Math.abs(shade) * 70)));
    });
    lens.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.lens === state.lens)));
  };
  const select = (n) => {
    if (!(n >= 0 && n < elements.length)) return;
    if (state.selected >= 0) elements[state.selected].removeAttribute("aria-selected");
    state.selected = n;
    elements[n].setAttribute("aria-selected", "true");
    stream.setAttribute("aria-activedescendant", elements[n].id);
    elements[n].scrollIntoView({ block: "nearest" });
    replace(detail, details(data, n));
    history.replaceState(null, "", `${to(turn)}?${offset ? `offset=${offset}&` : ""}token=${n}`);
  };
  for (const [name, [title]] of Object.entries(LENSES)) {
    const missing = (name === "ratio" && !data.new_logprobs) || (name === "entropy" && !data.entropies);
    const button = h("button", { type: "button", class: "button", "data-lens": name, disabled: missing, title: missing ? "not recorded for this step" : null }, title);
    button.addEventListener("click", () => { state.lens = name; paint(); });
    lens.append(button);
  }
  const strongest = () => select(data.ids.reduce((best, _, n) => (Math.abs(push(data, n) || 0) > Math.abs(push(data, best) || 0) ? n : best), 0));
  const clipped = data.ids.map((_, n) => n).filter((n) => at(data.clipped, n));
  const nextClipped = () => select(clipped.find((n) => n > state.selected) ?? clipped[0]);
  if (data.mask && data.advantages) lens.append(h("button", { type: "button", class: "button", onclick: strongest, "data-jump": "push" }, "Select the strongest push"));
  if (clipped.length) lens.append(h("button", { type: "button", class: "button", onclick: nextClipped }, `Next of ${clipped.length} clipped`));
  stream.append(...elements);
  stream.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    select(Math.max(0, Math.min(elements.length - 1, (state.selected < 0 ? -1 : state.selected) + by)));
  });
  paint();
  replace(detail, h("p", { class: "sub" }, "Select a token."));
  visit.show(h("div", null,
    h("div", { class: "top" }, h("h1", { tabindex: "-1", "data-focus": true }, `Tokens of turn ${trajectory}.${turn}`), chip(data.trained ? "trained" : "not trained", data.trained ? "good" : "part"), chip(data.agent), h("span", { class: "grow" }),
      h("span", { class: "pager" }, number_ > 0 ? link(to(number_ - 1), { class: "button" }, "← previous turn") : null, number_ + 1 < data.turns ? link(to(number_ + 1), { class: "button" }, "next turn →") : null)),
    h("p", { class: "sub" }, sentence(data)),
    notes([...(data.why_not ? [data.why_not] : []), ...data.notes]),
    h("details", { class: "prompt-block" }, h("summary", null, `Context before the turn: ${number(data.prompt.tokens)} tokens, not trained`), data.prompt.text === null ? h("p", { class: "sub" }, "no vocabulary") : pre(data.prompt.text, "prompt")),
    lens, key,
    h("div", { class: "token-layout" }, stream, detail),
    data.offset + data.ids.length < data.total ? h("p", null, link(`${to(turn)}?offset=${data.offset + data.ids.length}`, { class: "button" }, `Tokens from ${data.offset + data.ids.length + 1} on, of ${number(data.total)}`)) : null,
    h("details", { class: "as-table" }, h("summary", null, "As a table"), tokenTable(data))));
  if (state.selected >= 0) select(state.selected);
  bind({
    l: ["next colours", () => { const names = Object.keys(LENSES).filter((name) => !lens.querySelector(`[data-lens="${name}"]`).disabled); state.lens = names[(names.indexOf(state.lens) + 1) % names.length]; paint(); }],
    s: ["token with the strongest push", strongest],
    c: ["next clipped token", nextClipped],
    n: ["next turn", () => number_ + 1 < data.turns && go(to(number_ + 1))],
    p: ["previous turn", () => number_ > 0 && go(to(number_ - 1))],
    u: ["up: the episode", () => go(episode)],
  });
}

function sentence(data) {
  const trained = data.mask ? data.mask.filter(Boolean).length : null;
  return [`${number(data.total)} sampled tokens`, trained === null ? "mask not known" : `${number(trained)} of the shown tokens in the loss`, data.step === null ? null : `learner step ${data.step}`, data.finish === "stop" ? null : `ended by ${data.finish}`].filter(Boolean).join(" · ");
}

function label(data, n) {
  const text = data.texts === null ? `#${data.ids[n]}` : data.texts[n];
  return text === "" ? "·" : text;
}

function tokenElement(data, n, chosen) {
  const shown = plain(label(data, n)), element = h("span", { class: "token", role: "option", id: `token-${n}`, "data-token": String(n) }, shown.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t"));
  element.addEventListener("click", chosen);
  return element;
}

function details(data, n) {
  const logprob = data.logprobs[n], trained = at(data.mask, n), updated = at(data.new_logprobs, n), missing = "not recorded";
  const rows = [
    ["token", h("code", null, JSON.stringify(label(data, n)))],
    ["id", String(data.ids[n])],
    ["position", `${data.offset + n} of ${data.total}`],
    ["logprob when sampled", logprob === null ? "not finite" : `${number(logprob)} (probability ${percent(Math.exp(logprob), 2)})`],
    ["weight version", versionOf(data, n) < 0 ? "–" : `version ${versionOf(data, n)}`],
    ["sampled from", data.supports === null ? "the whole vocabulary" : data.supports[n] ? `${data.supports[n]} tokens` : "the whole vocabulary"],
    ["mask", data.forced.includes(n) ? "0: inserted, not sampled" : trained === null ? "not known" : trained ? "1: in the loss" : "0: not in the loss"],
    [data.rewards ? "reward" : "advantage", data.rewards ? signed(at(data.rewards, n)) : trained ? signed(at(data.advantages, n)) : "–"],
    ["push", push(data, n) === null ? "–" : signed(push(data, n))],
    ["logprob of the learner", updated === null ? missing : number(updated)],
    ["ratio", updated === null || logprob === null ? missing : number(Math.exp(updated - logprob))],
    ["clipped", at(data.clipped, n) === null ? missing : data.clipped[n] ? "yes: no gradient" : "no"],
    ["entropy, nats", at(data.entropies, n) === null ? missing : number(data.entropies[n])],
    ["importance weight", at(data.weights, n) === null ? missing : number(data.weights[n])],
  ];
  return [h("h2", null, `Token ${data.offset + n}`), h("dl", null, rows.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]))];
}

function tokenTable(data) {
  const columns = ["#", "Token", "Id", "Logprob", "Probability", "Version", "Mask", data.rewards ? "Reward" : "Advantage", "Ratio", "Clipped", "Entropy"].map((title, n) => ({ title, class: n === 1 ? "" : "num" }));
  const most = 500, rows = data.ids.slice(0, most).map((id, n) => ({ cells: [data.offset + n, h("code", null, JSON.stringify(label(data, n))), id, number(data.logprobs[n]), data.logprobs[n] === null ? "–" : percent(Math.exp(data.logprobs[n]), 2), `v${versionOf(data, n)}`, at(data.mask, n) ?? "–", signed(at(data.rewards || data.advantages, n)), at(data.new_logprobs, n) === null ? "–" : number(Math.exp(data.new_logprobs[n] - data.logprobs[n])), at(data.clipped, n) === null ? "–" : data.clipped[n] ? "yes" : "no", at(data.entropies, n) === null ? "–" : number(data.entropies[n])] }));
  return [table(columns, rows, { label: "Tokens" }), data.ids.length > most ? h("p", { class: "sub" }, `the first ${most} tokens`) : null];
}

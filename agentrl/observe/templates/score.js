// The page of `agentrl score RUN --serve`. All text of an episode comes as escaped HTML; this file adds none of it as code.
"use strict";

const RETRY_MS = 15000, ANSWER_MS = 70000, MOST_SKIPPED = 1000;
const GONE = ["unknown", "finished", "contradictory", "expired"]; // the part needs no score any more
const byId = (id) => document.getElementById(id);
const skipped = [];
let target = null, last = null, busy = false, timer = 0; // last: the newest score, while it can be replaced

if (location.hash.length > 1) {
  sessionStorage.setItem("token", location.hash.slice(1));
  history.replaceState(null, "", "/");
}

function say(text, isError = false) {
  byId("status").textContent = text;
  byId("status").className = isError ? "error" : "";
}

async function post(path, body) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}`, "Content-Type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(body), credentials: "omit", cache: "no-store" };
  const answer = await fetch(path, { ...options, signal: AbortSignal.timeout(ANSWER_MS) });
  if (answer.status === 401) login();
  return answer;
}

function login() {
  sessionStorage.removeItem("token");
  byId("episode").replaceChildren();
  target = null;
  byId("login").hidden = false;
  byId("token").focus();
}

async function problem(answer) {
  const { error } = await answer.json();
  return error;
}

async function exclusively(work) {
  if (busy) return;
  busy = true;
  clearTimeout(timer);
  document.querySelectorAll("#verdict button").forEach((button) => { button.disabled = true; });
  try {
    await work();
  } catch (error) {
    say(`The server does not answer (${error.message}). Try again. A score that is sent twice counts once.`, true);
    if (!target) timer = setTimeout(() => exclusively(show), RETRY_MS);
  } finally {
    busy = false;
    document.querySelectorAll("#verdict button").forEach((button) => { button.disabled = false; });
  }
}

async function show() {
  const answer = await post("/episode", { skipped, scored_by: localStorage.getItem("who") || "" });
  if (!answer.ok) return say((await problem(answer)).message, true);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html"); // scripts of such a document never run
  byId("episode").replaceChildren(...page.body.childNodes);
  const article = document.querySelector("article");
  target = article ? JSON.parse(article.dataset.target) : null;
  if (!article) {
    timer = setTimeout(() => exclusively(show), RETRY_MS);
    return;
  }
  byId("who").value = localStorage.getItem("who") || article.dataset.user;
  byId("verdict").addEventListener("submit", (event) => { event.preventDefault(); exclusively(send); });
  document.querySelectorAll("[data-key]").forEach((button) => button.addEventListener("click", () => press(button.dataset.key)));
  scrollTo(0, 0);
  byId("value").focus({ preventScroll: true });
}

async function send() {
  if (!target || !byId("verdict").reportValidity()) return;
  localStorage.setItem("who", byId("who").value);
  await store(target, Number(byId("value").value), false);
}

async function replace() {
  if (!last) return;
  const value = prompt(`${last.part} of ${last.episode_id}, ${last.low} to ${last.high}`, last.value);
  if (value !== null && value.trim() !== "") await store(last, Number(value), true);
}

async function store(scored, value, replace) {
  const { episode_id, part } = scored;
  const key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const answer = await post("/scores", { episode_id, part, value, replace, key, scored_by: localStorage.getItem("who") || undefined });
  if (!answer.ok) {
    const { cause, message, fix } = await problem(answer);
    say(`${message}. ${fix}`, true);
    if (replace || !GONE.includes(cause)) return;
  } else {
    const { remaining, repeated } = await answer.json();
    last = remaining ? { ...scored, value } : null;
    byId("replace").hidden = !last;
    say(`${repeated ? "This score was already stored" : "Stored"}: ${part}. Scores still missing in this group: ${remaining}.`);
  }
  if (replace) return;
  target = null;
  await show();
}

function press(key) {
  if (!target || busy) return;
  if (key === "s") {
    skipped.push(target.episode_id);
    if (skipped.length > MOST_SKIPPED) skipped.shift();
    target = null;
    say("");
    exclusively(show);
    return;
  }
  byId("value").value = key === "r" ? target.high : target.low;
  byId("value").focus({ preventScroll: true });
}

document.addEventListener("keydown", (event) => {
  if (!target || event.ctrlKey || event.altKey || event.metaKey || event.repeat || event.target.id === "who") return;
  const key = event.key.toLowerCase();
  if (["r", "w", "s"].includes(key)) {
    event.preventDefault();
    press(key);
  } else if (key === "enter" && event.target === document.body) {
    exclusively(send);
  }
});

byId("replace").addEventListener("click", () => exclusively(replace));

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value.trim());
  byId("token").value = "";
  byId("login").hidden = true;
  say("");
  exclusively(show);
});

if (sessionStorage.getItem("token")) exclusively(show);
else login();

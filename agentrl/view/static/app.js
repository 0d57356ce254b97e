// The router: an address after # is a page, so every view has a permalink. Each page reads its data and draws itself.

import { Problem, follow } from "./api.js";
import { chip, h, link, replace } from "./dom.js";
import { bind, showKeys } from "./keys.js";
import * as comparePage from "./page_compare.js";
import * as episodePage from "./page_episode.js";
import * as episodesPage from "./page_episodes.js";
import * as failurePage from "./page_failures.js";
import * as groupPage from "./page_group.js";
import * as runPage from "./page_run.js";
import * as runsPage from "./page_runs.js";
import * as stepPage from "./page_step.js";
import * as tokensPage from "./page_tokens.js";

const PAGES = [
  [/^$/, [], runsPage.render],
  [/^compare$/, [], comparePage.render],
  [/^run\/([^/]+)$/, ["run"], runPage.render],
  [/^run\/([^/]+)\/episodes$/, ["run"], episodesPage.render],
  [/^run\/([^/]+)\/steps\/(\d+)$/, ["run", "step"], stepPage.render],
  [/^run\/([^/]+)\/groups$/, ["run"], groupPage.renderList],
  [/^run\/([^/]+)\/groups\/(-?\d+)$/, ["run", "group"], groupPage.render],
  [/^run\/([^/]+)\/groups\/(-?\d+)\/(\d+)$/, ["run", "group", "attempt"], episodePage.render],
  [/^run\/([^/]+)\/groups\/(-?\d+)\/(\d+)\/(\d+)\/(\d+)$/, ["run", "group", "attempt", "trajectory", "turn"], tokensPage.render],
  [/^run\/([^/]+)\/evaluated\/([^/]+)$/, ["run", "episode"], episodePage.renderEvaluated],
  [/^run\/([^/]+)\/gate\/(\d+)$/, ["run", "version"], failurePage.renderVerdict],
  [/^run\/([^/]+)\/failures$/, ["run"], failurePage.render],
  [/^run\/([^/]+)\/failures\/([^/]+)$/, ["run", "trace"], failurePage.renderTrace],
];

const main = document.getElementById("main"), crumbs = document.getElementById("crumbs"), live = document.getElementById("live");
let current = null, visits = 0;

export const address = (...parts) => `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;

function parse() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  for (const [pattern, names, render] of PAGES) {
    const match = pattern.exec(path);
    if (!match) continue;
    try {
      const params = Object.fromEntries(names.map((name, n) => [name, decodeURIComponent(match[n + 1])]));
      return { params, query: new URLSearchParams(search || ""), render };
    } catch {
      return null;
    }
  }
  return null;
}

export function problem(error) {
  const gone = error instanceof Problem && error.status === 404;
  return h("div", { class: "problem", role: "alert" },
    h("h1", null, gone ? "Not found" : "This page cannot be shown"),
    h("p", null, error instanceof Problem ? error.message : "The page has an error. The browser's console shows it."),
    error instanceof Problem && error.fix && h("p", { class: "sub" }, `What to do: ${error.fix}`),
    h("p", null, link("#/", { class: "button" }, "All runs")));
}

// A selector of the element that has the focus, by which the page that is drawn next has the same one.
function selectorOf(element) {
  for (const name of ["data-key", "href", "id", "aria-label"]) {
    const value = element.getAttribute(name);
    if (value) return `${element.tagName}[${name}="${CSS.escape(value)}"]`;
  }
  return null;
}

class Visit {
  constructor(page) {
    Object.assign(this, page);
    this.leaving = [];
    this.id = visits += 1;
    this.stale = false;
  }

  onLeave(action) {
    this.leaving.push(action);
  }

  end() {
    this.stale = true;
    for (const action of this.leaving) action();
  }

  // Draws the page. The focus stays on the same element, if the page still has it.
  show(...children) {
    if (this.stale) return;
    const kept = main.contains(document.activeElement) ? selectorOf(document.activeElement) : null;
    replace(main, ...children);
    const same = kept && main.querySelector(kept);
    if (same) same.focus({ preventScroll: true });
  }

  title(text, trail) {
    if (this.stale) return;
    document.title = `${text} · agentrl`;
    const parts = [link("#/", null, "Runs"), ...trail.map(([name, to]) => (to ? link(to, null, name) : h("span", { "aria-current": "page" }, name)))];
    replace(crumbs, parts.map((part, n) => [n ? h("span", { class: "slash", "aria-hidden": "true" }, "/") : null, part]));
  }

  // Reads and draws now, and again when the run changes. `active` gets new events.
  async follow(run, draw, active) {
    await draw(null);
    if (this.stale) return;
    let waiting = false, next = null;
    const update = async (mark, first) => {
      if (this.stale) return;
      if (mark.gone) {
        live.textContent = "";
        this.show(problem(new Problem("the run was removed while this page was open", "return to the list of runs", 404)));
        return;
      }
      replace(live, mark.state === "running" ? [chip("live", "good"), ` step ${mark.step ?? 0}`] : "");
      if (first) return;
      next = { ...mark, reopened: mark.reopened || Boolean(next && next.reopened) };
      if (waiting) return;
      waiting = true;
      try {
        while (next && !this.stale) {
          const newest = next;
          next = null;
          await draw(newest);
        }
      } catch (error) {
        this.fail(error);
      }
      waiting = false;
    };
    this.onLeave(follow(run, update, (lines) => !this.stale && active && active(lines)));
  }

  fail(error) {
    if (this.stale) return;
    if (!(error instanceof Problem)) console.error(error);
    this.show(problem(error));
  }
}

export function go(to) {
  if (location.hash === to) return;
  location.hash = to;
}

async function navigate() {
  if (current) current.end();
  bind({});
  live.textContent = "";
  const page = parse(), requested = location.hash;
  const visit = (current = new Visit(page || { params: {}, query: new URLSearchParams() }));
  if (!page) {
    visit.title("Not found", [["Not found", null]]);
    visit.fail(new Problem("there is no page with this address", "go to the list of runs", 404));
    main.dataset.shown = requested;
    return;
  }
  main.setAttribute("aria-busy", "true");
  try {
    await page.render(visit);
  } catch (error) {
    visit.fail(error);
  }
  if (!visit.stale) {
    main.removeAttribute("aria-busy");
    main.dataset.shown = requested;
    const start = main.querySelector("[data-focus]") || main;
    start.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }
}

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  if (name === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", name);
  const button = document.getElementById("theme"), label = `Colours: ${name === "auto" ? "automatic" : name}`;
  button.setAttribute("aria-label", label);
  button.title = label;
  localStorage.setItem("agentrl-theme", name);
}

theme(THEMES.includes(localStorage.getItem("agentrl-theme")) ? localStorage.getItem("agentrl-theme") : "auto");
document.getElementById("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("agentrl-theme")) + 1) % THEMES.length]));
document.getElementById("help").addEventListener("click", showKeys);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
if (location.search) history.replaceState(null, "", `/${location.hash}`);
window.addEventListener("hashchange", navigate);
navigate();

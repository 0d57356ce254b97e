// Reads the server's JSON, and listens for changes of a run.

export class Problem extends Error {
  constructor(message, fix, status) {
    super(message);
    this.fix = fix;
    this.status = status;
  }
}

const part = encodeURIComponent, TOKEN = "agentrl-token", AGAIN_MS = 3000;
const given = new URLSearchParams(location.search).get("token");
if (given) localStorage.setItem(TOKEN, given);

function request(path, { query, headers, ...options }) {
  const authorization = `Bearer ${localStorage.getItem(TOKEN) || ""}`;
  return fetch(`/api/${path.map(part).join("/")}${query ? `?${query}` : ""}`, { ...options, credentials: "omit", headers: { authorization, ...headers } });
}

async function answer(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    body = null;
  }
  if (!response.ok) {
    const error = (body && body.error) || {};
    throw new Problem(error.message || `the server answered with status ${response.status}`, error.fix || "", response.status);
  }
  return body;
}

export async function get(path, query) {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query || {})) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") search.append(key, one);
  }
  let response;
  try {
    response = await request(path, { query: search.toString() });
  } catch {
    throw new Problem("the server does not answer", "check that agentrl view is still running", 0);
  }
  return answer(response);
}

export async function post(path, body) {
  return answer(await request(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) }));
}

// Reads the events of a run until the stream ends: `heard(name, data)`.
async function listen(run, heard, signal) {
  const response = await request(["runs", run, "live"], { signal });
  if (!response.ok) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [, name, data] = /^event: (\w+)\ndata: ([^]*)$/.exec(event) || [];
      if (name) heard(name, JSON.parse(data));
    }
  }
}

// Calls `changed` whenever the run has changed and `active` with new events, and returns a function that stops it. After a pause, in
// which events were missed, the first change has `reopened`.
// A hidden page listens to nothing, because a browser has only six connections to one server.
export function follow(run, changed, active) {
  let stopping = null, first = true;
  const open = async () => {
    const stop = (stopping = new AbortController());
    while (!stop.signal.aborted) {
      let reopened = !first;
      await listen(run, (name, data) => {
        if (name === "activity") return active && active(data);
        changed({ ...data, reopened }, first);
        first = reopened = false;
        if (data.gone) close();
      }, stop.signal).catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  };
  const close = () => {
    if (stopping) stopping.abort();
    stopping = null;
  };
  const shown = () => (document.hidden ? close() : stopping || open());
  document.addEventListener("visibilitychange", shown);
  shown();
  return () => {
    document.removeEventListener("visibilitychange", shown);
    close();
  };
}

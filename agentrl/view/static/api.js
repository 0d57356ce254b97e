// Reads the server's JSON, and listens for changes of a run.

export class Problem extends Error {
  constructor(message, fix, status) {
    super(message);
    this.fix = fix;
    this.status = status;
  }
}

const part = encodeURIComponent;

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
  const tail = search.toString();
  let response;
  try {
    response = await fetch(`/api/${path.map(part).join("/")}${tail ? `?${tail}` : ""}`, { credentials: "same-origin" });
  } catch {
    throw new Problem("the server does not answer", "check that agentrl view still runs", 0);
  }
  return answer(response);
}

export async function post(path, body) {
  const response = await fetch(`/api/${path.map(part).join("/")}`, {
    method: "POST",
    credentials: "same-origin",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  return answer(response);
}

// Calls `changed` whenever the run has changed and `active` with new events, and returns a function that stops it. After a pause, in
// which events were missed, the first change has `reopened`.
// A hidden page listens to nothing, because a browser has only six connections to one server.
export function follow(run, changed, active) {
  let source = null, first = true;
  const open = () => {
    let reopened = !first;
    source = new EventSource(`/api/runs/${part(run)}/live`);
    source.addEventListener("change", (event) => {
      const mark = JSON.parse(event.data);
      changed({ ...mark, reopened }, first);
      first = reopened = false;
      if (mark.gone) close();
    });
    source.addEventListener("activity", (event) => active && active(JSON.parse(event.data)));
  };
  const close = () => {
    if (source) source.close();
    source = null;
  };
  const shown = () => (document.hidden ? close() : source || open());
  document.addEventListener("visibilitychange", shown);
  shown();
  return () => {
    document.removeEventListener("visibilitychange", shown);
    close();
  };
}

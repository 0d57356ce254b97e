"""The routes of the JSON API, and the function for each route.

These functions only read runs. The functions that change a run are in `operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.gateway.request import RequestError
from agentrl.view import episode_data, failure_data, gate_data, group_data, live, run_data, search_data
from agentrl.view.library import RunLibrary, list_runs
from agentrl.view.source import Missing, RunSource

MAX_COMPARED = 8
MAX_CURVES = 40
_PAGE = 200  # maximum number of runs in one response


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a request, from its path and from its query string."""

    path: Mapping[str, str]
    pairs: Sequence[tuple[str, str]]

    def text(self, name: str, *, most: int = 400) -> str:
        """Returns the first value of a query parameter; empty if the parameter is missing. Raises `RequestError` if the value is too long
        or contains a null character."""
        value = next((value for key, value in self.pairs if key == name), "")
        if len(value) > most:
            raise RequestError("invalid", f"{name} has more than {most} characters.")
        if "\0" in value:
            raise RequestError("invalid", f"{name} contains a null character.")
        return value

    def texts(self, name: str, *, most: int) -> list[str]:
        """Returns all values of a query parameter. Raises `RequestError` if there are more than `most`."""
        values = [value for key, value in self.pairs if key == name]
        if len(values) > most:
            raise RequestError("invalid", f"{name} has more than {most} values.")
        return values

    def number(self, name: str, default: int | None = None) -> int | None:
        """Returns an integer parameter from the path or the query; `default` if it is missing. Raises `RequestError` if the value is not an
        integer of at most 15 characters."""
        value = self.path.get(name) or self.text(name)
        if not value:
            return default
        if not (value.removeprefix("-").isascii() and value.removeprefix("-").isdigit() and len(value) < 16):
            raise RequestError("invalid", f"{name} must be a whole number.")
        return int(value)

    def count(self, name: str) -> int:
        """Returns an integer parameter; 0 if it is missing. Raises `RequestError` if the value is negative or not an integer."""
        value = self.number(name, 0)
        if value is None or value < 0:
            raise RequestError("invalid", f"{name} must not be negative.")
        return value


Read = Callable[[RunSource, Query], Any]


def _runs(library: RunLibrary, query: Query) -> Any:
    """Returns a page of the runs whose name, recipe or model contains the search text. Active runs come first; active and inactive runs are
    each sorted by the time of the last change, the newest first."""
    search, entries = query.text("search").casefold(), library.entries()
    runs = list_runs(entries)
    matching = [run for run in runs if search in f"{run['name']}\n{run['recipe']}\n{run['model']}".casefold()]
    matching.sort(key=lambda run: (run["state"] != "running", -(run["changed_at"] or 0.0)))
    offset = query.count("offset")
    return {"runs": matching[offset : offset + _PAGE], "total": len(matching), "single": entries[0].id if library.is_single else None}


def _compare(library: RunLibrary, query: Query) -> Any:
    sources = []
    for name in query.texts("run", most=MAX_COMPARED):
        source = library.open(name)
        if source is None:
            raise Missing("one of the selected runs does not exist", fix="select runs in the list")
        sources.append(source)
    return run_data.compare_runs(sources)


ROUTES: Mapping[str, Callable[[RunLibrary, Query], Any] | Read] = {
    "runs": _runs,
    "compare": _compare,
    "runs/{run}": lambda source, query: run_data.run_data(source),
    "runs/{run}/ledger": lambda source, query: run_data.ledger_data(source),
    "runs/{run}/curves": lambda source, query: run_data.curves_data(source, query.texts("key", most=MAX_CURVES)),
    "runs/{run}/steps/{step}": lambda source, query: group_data.step_data(source, query.number("step") or 0, offset=query.count("offset")),
    "runs/{run}/groups": lambda source, query: group_data.newest_groups(source, before=query.number("before")),
    "runs/{run}/groups/{group}": lambda source, query: group_data.group_data(source, query.number("group") or 0),
    "runs/{run}/groups/{group}/{attempt}": lambda source, query: episode_data.episode_data(
        source, query.number("group") or 0, query.count("attempt"), offset=query.count("offset")
    ),
    "runs/{run}/groups/{group}/{attempt}/{trajectory}/{turn}": lambda source, query: episode_data.tokens_data(
        source,
        query.number("group") or 0,
        query.count("attempt"),
        query.count("trajectory"),
        query.count("turn"),
        offset=query.count("offset"),
    ),
    "runs/{run}/episodes": search_data.search_data,
    "runs/{run}/evaluated/{episode}": lambda source, query: episode_data.evaluated_data(source, query.path["episode"]),
    "runs/{run}/events": lambda source, query: live.events_data(source),
    "runs/{run}/gate/{version}": lambda source, query: gate_data.gate_data(source, query.count("version")),
    "runs/{run}/facets": lambda source, query: search_data.facets_data(source),
    "runs/{run}/failures": failure_data.failures_data,
    "runs/{run}/failures/clusters": failure_data.clusters_data,
    "runs/{run}/failures/{trace}": lambda source, query: failure_data.trace_data(source, query.path["trace"]),
}
"""Path below `/api/` -> function that reads the library or one run."""


def read_route(library: RunLibrary, read: Any, query: Query) -> Any:
    """Returns the JSON data for a route. Raises `Missing` if the run does not exist, and the errors that the route's function raises."""
    if "run" not in query.path:
        return read(library, query)
    source = library.open(query.path["run"])
    if source is None:
        raise Missing("there is no such run, or it was removed", fix="return to the list of runs")
    with source.lock:
        return read(source, query)

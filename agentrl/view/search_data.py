"""The JSON for the list of episodes, with filters, full-text search and pages, from the index in the run's store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentrl.errors import StoreError, UserError
from agentrl.experience.episode_index import EpisodeRow
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.gateway.request import RequestError
from agentrl.view.source import RunSource

if TYPE_CHECKING:
    from agentrl.view.routes import Query

TEXTS = ("text", "phase", "kind", "split", "outcome", "stop_reason", "tool", "exclusion", "blame", "sort", "after")
NUMBERS = ("version", "step", "group", "min_tokens", "max_tokens")
_LIMIT = 50


def search_data(source: RunSource, query: Query) -> dict[str, Any]:
    """Returns a page of the matching episodes. Raises `RequestError` or `UserError` if a filter is invalid, `UserError` if the run has no
    index, `Missing` if it was removed, and `StoreError` if the index cannot be read."""
    notes = source.refresh()
    fields: dict[str, Any] = {name: text for name in TEXTS if (text := query.text(name))}
    fields |= {name: number for name in NUMBERS if (number := query.number(name)) is not None}
    fields |= {name: score for name in ("min_score", "max_score") if (score := _score(query, name)) is not None}
    wanted = EpisodeQuery(**fields, descending=query.text("ascending") != "1", limit=_LIMIT)
    page = source.index().search(wanted)
    return {
        "run": source.id,
        "rows": [row_data(row) for row in page.rows],
        "next": page.next,
        "total": page.total,
        "is_exact": page.is_exact,
        "notes": notes,
    }


def facets_data(source: RunSource) -> dict[str, Any]:
    """Returns the values of each filter, each with its number of episodes. If the run has no index, there are no values, and a note gives
    the reason."""
    try:
        index = source.index()
        deleted = "The episodes of older steps were deleted because of store.options.keep_steps. They cannot be listed or searched."
        return {**asdict(index.facets()), "notes": [deleted] if index.has_deleted() else []}
    except (UserError, StoreError) as error:
        return {"episodes": 0, "notes": [str(error).replace("\n  fix:", ";")[:600]]}


def row_data(row: EpisodeRow) -> dict[str, Any]:
    """Returns an episode as a row of the list."""
    return {
        **{name: getattr(row, name) for name in ("number", "group", "attempt", "step", "state", "score", "tokens", "turns", "seconds")},
        **{name: getattr(row, name) for name in ("id", "phase", "kind", "split", "outcome", "exclusion", "blame", "unused")},
        "task": row.task_id,
        "stop": row.stop_reason,
        "versions": [row.oldest_version, row.newest_version],
        "tools": list(row.tools),
        "sampled_at": row.sampled_at,
    }


def _score(query: Query, name: str) -> float | None:
    text = query.text(name, most=40)
    try:
        value = float(text) if text else None
    except ValueError:
        raise RequestError("invalid", f"{name} must be a number.") from None
    if value is not None and not abs(value) < 1e300:
        raise RequestError("invalid", f"{name} must be a finite number.")
    return value

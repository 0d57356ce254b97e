"""Finds the run folders in a folder, which may come from a third party. The id of a run is derived from the name of its folder. Links that
lead outside the folder are skipped."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from agentrl.observe.run_folders import changed_at, check_runs_folder, find_runs, held_locks, is_run, last_step, run_state
from agentrl.observe.rundata import as_list, as_mapping, is_finite, read_object, read_rate
from agentrl.observe.summary import SUMMARY_FILE
from agentrl.view.source import RunSource

MAX_RUNS = 2000
"""Maximum number of runs that are listed for a folder. The newest runs are listed."""
MAX_OPEN = 8
"""Maximum number of runs whose metrics stay in memory."""
_MAX_SUMMARY = 2 << 20
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run folder: the id of the run in page addresses, its printable name, and its path."""

    id: str
    name: str
    path: Path


class RunLibrary:
    """The runs in a folder, or a single run.

    Raises `UserError` if the folder does not exist.
    """

    def __init__(self, root: Path) -> None:
        check_runs_folder(root)
        self.root = root.resolve()
        self.is_single = is_run(self.root)
        self._sources: OrderedDict[str, RunSource] = OrderedDict()
        self._lock = Lock()

    def entries(self) -> list[RunEntry]:
        """Returns the `MAX_RUNS` newest runs, sorted by name. Links that lead outside the folder are not followed."""
        paths = [self.root] if self.is_single else find_runs(self.root, most=MAX_RUNS)
        entries = (RunEntry(id=_run_id(path.name), name=_shown(path.name), path=path) for path in paths)
        return sorted(entries, key=lambda run: run.name)

    def open(self, run_id: str) -> RunSource | None:
        """Returns the reader of a run; None if there is no run with this id."""
        entry = self._entry(run_id)
        with self._lock:
            if entry is None:
                self._sources.pop(run_id, None)
                return None
            source = self._sources.pop(run_id, None) or RunSource(entry.path, run_id=entry.id, name=entry.name)
            self._sources[run_id] = source
            while len(self._sources) > MAX_OPEN:
                _close_unused(self._sources.popitem(last=False)[1])
            return source

    def close(self) -> None:
        """Closes all stores."""
        with self._lock:
            for source in self._sources.values():
                source.close()
            self._sources.clear()

    def _entry(self, run_id: str) -> RunEntry | None:
        """Returns the run with the given id, without reading other runs; None if there is no such run."""
        if self.is_single:
            return next((entry for entry in self.entries() if entry.id == run_id), None)
        try:
            name = run_id if _PLAIN.fullmatch(run_id) else os.fsdecode(bytes.fromhex(run_id.removeprefix("~")))
            path = self.root / name
            is_child = _run_id(name) == run_id and "/" not in name and name not in (".", "..")
            if is_child and path.resolve().is_relative_to(self.root) and path.is_dir() and is_run(path):
                return RunEntry(id=run_id, name=_shown(name), path=path)
        except (OSError, ValueError, RuntimeError):  # no run has such an id; `resolve` raises RuntimeError for a loop of links
            pass
        return None


def _close_unused(source: RunSource) -> None:
    """Closes the store of a run if no request is reading it.

    If a request is reading it, the store is closed when the request finishes, because the request holds the last reference.
    """
    if source.lock.acquire(blocking=False):
        try:
            source.close()
        finally:
            source.lock.release()


def _run_id(name: str) -> str:
    """Returns a plain name unchanged, and any other name as `~` followed by its bytes in hexadecimal."""
    return name if _PLAIN.fullmatch(name) else f"~{os.fsencode(name).hex()}"


def _shown(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")[:200]


def list_runs(entries: Sequence[RunEntry]) -> list[dict[str, Any]]:
    """Returns the list of runs as JSON data. A run whose files have not changed is not read again."""
    locks = held_locks()
    return [{**_line(entry, _marks(entry.path)), "state": run_state(entry.path, locks)} for entry in entries]


def _marks(path: Path) -> tuple[tuple[int, int], ...]:
    """Returns pairs (modification time, size) for the files that `_line` reads."""
    marks = []
    for name in (SUMMARY_FILE, "recipe.json", "metrics.jsonl"):
        try:
            status = (path / name).stat()
            marks.append((status.st_mtime_ns, status.st_size))
        except OSError:
            marks.append((0, 0))
    return tuple(marks)


@lru_cache(maxsize=MAX_RUNS)
def _line(entry: RunEntry, marks: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    notes: list[str] = []
    summary = read_object(entry.path / SUMMARY_FILE, notes, most=_MAX_SUMMARY)
    recipe = read_object(entry.path / "recipe.json", notes, most=_MAX_SUMMARY)
    last = last_step(entry.path)
    steps = recipe.get("steps")
    return {
        "id": entry.id,
        "name": entry.name,
        "recipe": _text(recipe.get("name")),
        "model": _text(as_mapping(recipe.get("policy")).get("model")),
        "step": last.get("step") if is_finite(last.get("step")) else None,
        "steps": steps if is_finite(steps) else None,
        "reward": last.get("reward_mean") if is_finite(last.get("reward_mean")) else None,
        "before": _rate(summary.get("heldout_before")),
        "after": _rate(summary.get("heldout_after")),
        "episodes": summary.get("episodes") if is_finite(summary.get("episodes")) else None,
        "tokens": summary.get("tokens_trained") if is_finite(summary.get("tokens_trained")) else None,
        "wall_s": sum(value for value in as_mapping(summary.get("wall_s")).values() if is_finite(value)) or None,
        "problems": [_text(problem)[:500] for problem in as_list(summary.get("problems"))[:20]],
        "changed_at": changed_at(entry.path),
        "notes": notes,
    }


def _text(value: Any) -> str:
    return value[:500] if isinstance(value, str) else ""


def _rate(value: Any) -> dict[str, float] | None:
    rate = read_rate(value)
    return None if rate is None else asdict(rate)

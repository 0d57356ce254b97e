"""Reads a run folder for the report. A missing or damaged part becomes a note, and the rest is shown."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from agentrl.base.untrusted_files import open_file, read_bytes
from agentrl.errors import StoreError
from agentrl.observe.stats import Rate
from agentrl.observe.summary import Summary

Line = dict[str, Any]
Curve = tuple[str, int, tuple[tuple[float, float], ...]]
"""Split, number of attempts, and points (mean sampled tokens, share of tasks solved)."""
Curves = tuple[Curve, ...]

_MAX_DIGITS = 18  # of an integer; longer ones become floats
_MAX_BYTES = 1 << 30  # of a file
_MAX_LINE = 64 << 20
_EPISODE: Mapping[str, type] = {"task_id": str, "split": str, "messages": list}
_TASK_GROUP: Mapping[str, type] = {"group": int, "task": str, "kind": str, "counted": int}
_SETBACK: Mapping[str, type] = {"step": int, "action": str, "reasons": list, "groups": list, "episodes": list}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The content of a run folder."""

    name: str
    recipe: Line
    summary: Summary | None
    metrics: tuple[Line, ...]  # one per step, in order
    episodes: dict[str, tuple[Line, ...]]  # phase -> transcripts
    setbacks: tuple[Line, ...]  # updates and groups that were not trained on, with reasons
    left_out: tuple[tuple[str, str, dict[str, int]], ...]  # of evaluations: phase, split, reason -> excluded episodes
    compute: Curves  # of the last evaluation: success by token budget
    thinking: Curves  # success by bound on thinking
    evaluated: dict[str, Rate]  # split -> result of `agentrl eval` or `agentrl sample`; empty for a training run
    taught: tuple[Line, ...]  # one line per training group: its task and scores
    failures: Line  # content of `failures/failures.json`; empty without one
    notes: tuple[str, ...]  # what could not be read

    def series(self, key: str) -> tuple[tuple[float, float], ...]:
        """(step, value) of the steps with a finite number under `key`."""
        values = ((line["step"], line.get(key)) for line in self.metrics)
        return tuple((step, value) for step, value in values if is_finite(value))


def read_run(run_dir: Path) -> RunData:
    """Reads a run folder. Raises `StoreError` if it does not exist."""
    if not run_dir.is_dir():
        raise StoreError(f"no run folder {run_dir}")
    notes: list[str] = []
    lines = read_lines(run_dir / "metrics.jsonl", {"step": int}, notes)
    by_step = {line["step"]: line for line in lines}  # a step that a resumed run repeated counts once
    evaluations = read_object(run_dir / "evaluations.json", notes)
    evaluated = dict(_read_rates(evaluations))
    episodes = {path.stem: _read_episodes(path, notes) for path in sorted((run_dir / "episodes").glob("*.jsonl"))}
    return RunData(
        name=run_dir.name,
        recipe=read_object(run_dir / "recipe.json", notes),
        summary=_read_summary(run_dir, [] if evaluated else notes),
        metrics=tuple(by_step[step] for step in sorted(by_step)),
        episodes=episodes,
        setbacks=tuple(read_lines(run_dir / "failures" / "updates.jsonl", _SETBACK, notes, inside=run_dir)),
        left_out=tuple(_read_left_out(evaluations)),
        compute=tuple(_read_compute(evaluations)),
        thinking=tuple(_read_thinking(evaluations)),
        evaluated=evaluated,
        taught=tuple(read_lines(run_dir / "tasks.jsonl", _TASK_GROUP, notes)),
        failures=read_object(run_dir / "failures" / "failures.json", notes, inside=run_dir),
        notes=tuple(notes),
    )


def _read_left_out(phases: Line) -> Iterator[tuple[str, str, dict[str, int]]]:
    for phase, split, result in _results(phases):
        reasons = result.get("left_out_reasons")
        if isinstance(reasons, dict):
            yield phase, split, {str(reason): count for reason, count in reasons.items() if isinstance(count, int)}


def _read_compute(phases: Line) -> Iterator[Curve]:
    """Success by token budget in the last phase."""
    last = _last(phases)
    for phase, split, result in _results(phases):
        for line in as_list(result.get("compute")) if phase == last else ():
            attempts, points = (line.get("attempts"), as_list(line.get("points"))) if isinstance(line, dict) else (None, [])
            pairs = tuple((point[0], point[1]) for point in points if isinstance(point, list) and len(point) == 2)
            if isinstance(attempts, int) and pairs and all(is_finite(value) for pair in pairs for value in pair):
                yield split, attempts, pairs


def _read_thinking(phases: Line) -> Iterator[Curve]:
    """Success of k attempts with each bound on thinking, and without one, in the last phase."""
    last = _last(phases)
    for phase, split, result in _results(phases):
        bounded = [one for one in as_list(result.get("thinking")) if isinstance(one, dict)] if phase == last else []
        points: dict[int, list[tuple[float, float]]] = {}
        for one in (*bounded, result) if bounded else ():
            tokens, shares = one.get("tokens_mean"), one.get("pass_at")
            for k, share in shares.items() if isinstance(shares, dict) else ():
                if k.isdecimal() and len(k) < 6 and is_finite(tokens) and is_finite(share):
                    points.setdefault(int(k), []).append((int(k) * tokens, share))
        for attempts in sorted(points):
            yield split, attempts, tuple(sorted(points[attempts]))


def _last(phases: Line) -> str:
    return next((phase for phase in ("after", "eval", "sample", "before") if phase in phases), "")


def _read_rates(phases: Line) -> Iterator[tuple[str, Rate]]:
    for phase, split, result in _results(phases):
        value, low, high, count = (result.get(name) for name in ("value", "ci_low", "ci_high", "n"))
        if phase in ("eval", "sample") and isinstance(count, int) and is_finite(value) and is_finite(low) and is_finite(high):
            yield split, Rate(value=value, ci_low=low, ci_high=high, n=count)


def _results(phases: Line) -> Iterator[tuple[str, str, Line]]:
    for phase, splits in phases.items():
        for split, result in splits.items() if isinstance(splits, dict) else ():
            if isinstance(result, dict):
                yield phase, split, result


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_episodes(path: Path, notes: list[str]) -> tuple[Line, ...]:
    """Transcripts of one phase. A repeated evaluation replaces the earlier one."""
    lines = read_lines(path, _EPISODE, notes, inside=path.parent.parent)
    return tuple({(line["split"], line["task_id"], str(line.get("step")) if path.stem == "train" else ""): line for line in lines}.values())


def read_lines(
    path: Path, required: Mapping[str, type], notes: list[str], *, most: int = _MAX_BYTES, inside: Path | None = None
) -> list[Line]:
    """Returns the lines of a file as `iter_lines` yields them."""
    return list(iter_lines(path, required, notes, most=most, inside=inside))


def iter_lines(
    path: Path, required: Mapping[str, type], notes: list[str], *, most: int = _MAX_BYTES, inside: Path | None = None
) -> Iterator[Line]:
    """Yields the lines of a file with the `required` keys and types, with one in memory at a time; none if the file is missing.

    Args:
        notes: gets what cannot be read.
        most: bytes of the file.
        inside: folder that must contain the file after links are followed; None means the file's own folder.
    """
    bad = 0
    try:
        with open_file(path, inside=inside or path.parent) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise ValueError(f"is larger than {most >> 20} MiB")
            while text := file.readline(_MAX_LINE):
                if not text.strip():
                    continue
                line = parse_object(text.decode("utf-8", "replace"))
                if line is not None and all(isinstance(line.get(key), kind) for key, kind in required.items()):
                    yield line
                else:
                    bad += 1
    except (OSError, ValueError) as error:
        _note_unreadable(path, error, notes)
    if bad:
        notes.append(f"{path.name}: {bad} unreadable {'line' if bad == 1 else 'lines'} ignored")


def _text(path: Path, notes: list[str], most: int, inside: Path | None) -> str | None:
    """Returns the text of a file; None if it is missing or cannot be read."""
    try:
        return read_bytes(path, most=most, inside=inside or path.parent).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        _note_unreadable(path, error, notes)
        return None


def _note_unreadable(path: Path, error: OSError | ValueError, notes: list[str]) -> None:
    if isinstance(error, ValueError):
        notes.append(f"{path.name} cannot be read, because it {error}")
    elif not isinstance(error, FileNotFoundError):
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")


def parse_object(text: str) -> Line | None:
    """Returns a JSON object; None for anything else. Very long integers become floats, possibly infinite."""
    try:
        data = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= _MAX_DIGITS else float(digits))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def as_list(value: Any) -> list[Any]:
    """Returns the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def read_object(path: Path, notes: list[str], *, most: int = _MAX_BYTES, inside: Path | None = None) -> Line:
    """Returns the JSON object in a file; empty if it is missing or something else. `most` and `inside`: see `iter_lines`."""
    text = _text(path, notes, most, inside)
    content = {} if text is None else parse_object(text)
    if content is None:
        notes.append(f"{path.name} cannot be read")
    return content or {}


def _read_summary(run_dir: Path, notes: list[str]) -> Summary | None:
    try:
        return Summary.read(run_dir)
    except FileNotFoundError:
        notes.append("The run has no summary yet.")
    except StoreError:
        notes.append("summary.json does not validate and is ignored")
    except OSError as error:
        notes.append(f"summary.json cannot be read: {error.strerror or error}")
    return None

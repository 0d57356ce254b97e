"""Reads a run folder for the report. A missing or damaged file is reported in a note, and the content of all other files is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import StoreError
from agentrl.observe.rundata import Line, as_list, is_finite, read_lines, read_object, read_rate
from agentrl.observe.stats import Rate
from agentrl.observe.summary import Summary
from agentrl.observe.tails import MetricsTable, read_new_lines

Curve = tuple[str, int, tuple[tuple[float, float], ...]]
"""Split, number of attempts, and points (mean sampled tokens, share of solved tasks)."""
Curves = tuple[Curve, ...]

_EPISODE: Mapping[str, type] = {"task_id": str, "split": str, "messages": list}
_TASK_GROUP: Mapping[str, type] = {"group": int, "task": str, "kind": str, "counted": int}
SETBACK: Mapping[str, type] = {"step": int, "action": str, "reasons": list, "groups": list, "episodes": list}
"""Required keys of a line in `failures/updates.jsonl`, and their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The content of a run folder that the report shows."""

    name: str
    recipe: Line
    summary: Summary | None
    metrics: MetricsTable
    episodes: dict[str, tuple[Line, ...]]  # phase -> transcripts
    setbacks: tuple[Line, ...]  # updates and groups that were not trained, with reasons
    left_out: tuple[tuple[str, str, dict[str, int]], ...]  # exclusions in evaluations: phase, split, reason -> number of excluded episodes
    compute: Curves  # success by token budget in the last evaluation
    thinking: Curves  # success by bound on thinking
    evaluated: dict[str, Rate]  # split -> result of `agentrl eval` or `agentrl sample`; empty for a training run
    taught: tuple[Line, ...]  # one line per training group: its task and scores
    failures: Line  # content of `failures/failures.json`; empty if there is none
    notes: tuple[str, ...]  # messages about what could not be read


def read_run(run_dir: Path) -> RunData:
    """Reads a run folder. Raises `StoreError` if the folder does not exist."""
    if not run_dir.is_dir():
        raise StoreError(f"there is no run folder {run_dir}")
    notes: list[str] = []
    metrics = MetricsTable(run_dir / "metrics.jsonl")
    read_new_lines(metrics, notes)
    evaluations = read_object(run_dir / "evaluations.json", notes)
    evaluated = dict(_read_rates(evaluations))
    episodes = {path.stem: _read_episodes(path, notes) for path in sorted((run_dir / "episodes").glob("*.jsonl"))}
    return RunData(
        name=run_dir.name,
        recipe=read_object(run_dir / "recipe.json", notes),
        summary=read_summary(run_dir, [] if evaluated else notes),
        metrics=metrics,
        episodes=episodes,
        setbacks=tuple(read_lines(run_dir / "failures" / "updates.jsonl", SETBACK, notes, inside=run_dir)),
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
    """Yields the curves of success by token budget in the last evaluation phase."""
    last = _last(phases)
    for phase, split, result in _results(phases):
        for line in as_list(result.get("compute")) if phase == last else ():
            attempts, points = (line.get("attempts"), as_list(line.get("points"))) if isinstance(line, dict) else (None, [])
            pairs = tuple((point[0], point[1]) for point in points if isinstance(point, list) and len(point) == 2)
            if isinstance(attempts, int) and pairs and all(is_finite(value) for pair in pairs for value in pair):
                yield split, attempts, pairs


def _read_thinking(phases: Line) -> Iterator[Curve]:
    """Yields a curve per number of attempts in the last evaluation phase, with one point per limit on thinking and one without a limit."""
    last = _last(phases)
    for phase, split, result in _results(phases):
        bounded = [rate for rate in as_list(result.get("thinking")) if isinstance(rate, dict)] if phase == last else []
        points: dict[int, list[tuple[float, float]]] = {}
        for rate in (*bounded, result) if bounded else ():
            tokens, shares = rate.get("tokens_mean"), rate.get("pass_at")
            for k, share in shares.items() if isinstance(shares, dict) else ():
                if k.isdecimal() and len(k) < 6 and is_finite(tokens) and is_finite(share):
                    points.setdefault(int(k), []).append((int(k) * tokens, share))
        for attempts in sorted(points):
            yield split, attempts, tuple(sorted(points[attempts]))


def _last(phases: Line) -> str:
    return next((phase for phase in ("after", "eval", "sample", "before") if phase in phases), "")


def _read_rates(phases: Line) -> Iterator[tuple[str, Rate]]:
    for phase, split, result in _results(phases):
        if phase in ("eval", "sample") and (rate := read_rate(result)) is not None:
            yield split, rate


def _results(phases: Line) -> Iterator[tuple[str, str, Line]]:
    for phase, splits in phases.items():
        for split, result in splits.items() if isinstance(splits, dict) else ():
            if isinstance(result, dict):
                yield phase, split, result


def _read_episodes(path: Path, notes: list[str]) -> tuple[Line, ...]:
    """Returns the transcripts of one phase. If an evaluation was repeated, only the newest transcript of each task is returned."""
    lines = read_lines(path, _EPISODE, notes, inside=path.parent.parent)
    return tuple({(line["split"], line["task_id"], str(line.get("step")) if path.stem == "train" else ""): line for line in lines}.values())


def read_summary(run_dir: Path, notes: list[str]) -> Summary | None:
    """Returns the summary of a run. If the summary cannot be read, returns None and adds the reason to `notes`."""
    try:
        return Summary.read(run_dir)
    except FileNotFoundError:
        notes.append("the run has no summary yet")
    except StoreError:
        notes.append("summary.json does not validate and is ignored")
    except OSError as error:
        notes.append(f"summary.json cannot be read: {error.strerror or error}")
    return None

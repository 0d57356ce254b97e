"""Promotes traces to regression cases: the frozen task of each, with its origin."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from agentrl.errors import UserError
from agentrl.failure.case import Baseline, Case, check_attempt_options, load_suite, save_case
from agentrl.failure.imported import UserParts, task_from_trace
from agentrl.failure.listing import kind_of_task
from agentrl.failure.overlap import Overlap, WithheldTasks
from agentrl.failure.trace import CaptureReason, Trace
from agentrl.records import EpisodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """The result of promoting one trace."""

    trace: str
    case: str  # the new case, or the existing one that it overlaps with
    likeness: Overlap | None = None  # to the existing case
    path: Path | None = None  # file of the new case; None if its task is in the suite already

    @property
    def summary(self) -> str:
        """One line for a person."""
        if self.path is None:
            return f"{self.trace}: its task is that of case {self.case} already"
        twin = f" (a near duplicate of case {self.case}, which stays in the suite)" if self.likeness is not None else ""
        return f"{self.trace}: {self.path}{twin}"


def case_from_trace(
    trace: Trace,
    *,
    note: str = "",
    by: str = "",
    threshold: float | None = None,
    repeats: int | None = None,
    start: EpisodeState | None = None,
    supplied: UserParts | None = None,
) -> Case:
    """Builds the case of a trace. Its id comes from the task's kind and key (and the turn of `start`), so a task has one case.

    The baseline is the score of the policy that failed.

    Args:
        start: the episode's state at which the case starts, instead of the task.
        supplied: user-supplied parts for an imported trace.

    Raises `UserError` for a trace without a task, and for a fault, which says nothing about a policy.
    """
    task = trace.task if trace.task is not None else task_from_trace(trace, supplied or UserParts())
    if trace.why is CaptureReason.FAULT:
        raise UserError(
            f"trace {trace.id} is a fault of the infrastructure or the task, not a failure of the policy",
            fix="promote others: agentrl failures list RUN shows why each was captured",
        )
    kind = re.sub(r"[^A-Za-z0-9_]+", "-", kind_of_task(task)).strip("-_")[:40] or "case"
    origin = {key: value for key, value in trace.origin.items() if key != "audit"}
    origin |= {"trace": trace.id, "phase": trace.phase, "step": str(trace.step), "why": str(trace.why)}
    origin |= {"versions": " ".join(map(str, trace.versions))} | ({"by": by} if by else {})
    run = f"{trace.origin['run']}:" if "run" in trace.origin else ""
    return Case(
        id=f"{kind}-{task.key[:12]}" + (f"-t{start.turn_count + 1}" if start is not None else ""),
        task=task,
        trace=f"{run}{trace.id}",
        tags=trace.tags,
        origin=origin,
        note=note,
        by=by,
        threshold=threshold,
        repeats=repeats,
        baseline=_baseline(trace),
        start=start,
    )


def promote(
    traces: list[Trace],
    suite: Path,
    *,
    note: str = "",
    by: str = "",
    threshold: float | None = None,
    repeats: int | None = None,
    starts: Mapping[str, EpisodeState | None] = MappingProxyType({}),
    supplied: UserParts | None = None,
) -> list[Promotion]:
    """Adds a case for each trace to a suite, which is created if necessary. Tasks that are in the suite already are not added again.

    Two cases with a start are compared only if they start with the same tokens.

    Args:
        note: why the cases are kept.
        by: who promotes them.
        threshold: mean score that the attempts at each case must reach; None means the evaluation's threshold.
        repeats: attempts at each case in an evaluation; None means the suite's number.
        starts: trace id -> the state at which its case starts; other cases start with their task.
        supplied: user-supplied parts for imported traces.

    Raises `UserError` for a trace that cannot become a case, before any case is written.
    """
    check_attempt_options(repeats=repeats, threshold=threshold)
    cases = [
        case_from_trace(trace, note=note, by=by, threshold=threshold, repeats=repeats, start=starts.get(trace.id), supplied=supplied)
        for trace in traces
    ]
    known = list(load_suite(suite).cases) if any((suite / "cases").glob("*.json")) else []
    promoted: list[Promotion] = []
    for trace, case in zip(traces, cases, strict=True):
        comparable = WithheldTasks(other for other in known if _start_tokens(other) == _start_tokens(case))
        existing, overlap = comparable.match(case.task) or (None, None)
        if existing is not None and overlap is Overlap.SAME:
            promoted.append(Promotion(trace=trace.id, case=existing.id, likeness=overlap))
            continue
        path = save_case(suite, case)
        promoted.append(Promotion(trace=trace.id, case=case.id if existing is None else existing.id, likeness=overlap, path=path))
        known.append(case)
    return promoted


def _baseline(trace: Trace) -> Baseline | None:
    """The score of the trace's single attempt; None if it is unscored or several versions sampled it."""
    value = None if trace.score is None else trace.score.value
    if value is None or not math.isfinite(value) or len(trace.versions) > 1:
        return None
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Baseline(model=trace.origin.get("model", ""), version=next(iter(trace.versions), None), scores=(value,), at=at)


def _start_tokens(case: Case) -> tuple[tuple[int, ...], ...]:
    """The tokens that a case starts with; empty if it starts with its task."""
    if case.start is None:
        return ()
    return (*(ids for turn in case.start.trajectories[0].turns for ids in (turn.prompt_ids, turn.completion_ids)), *case.start.prompt_ids)

"""From a trace to a regression case: its task, frozen, with where it comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """What became of a trace."""

    trace: str
    case: str  # the case that it is now, or the one that it is like
    likeness: Overlap | None = None  # to `case`, which was there before
    path: Path | None = None  # of the case that was written; None: none was, its task is in the suite

    @property
    def summary(self) -> str:
        if self.path is None:
            return f"{self.trace}: its task is that of case {self.case} already"
        twin = f" (a near twin of case {self.case}, which is kept, too)" if self.likeness is not None else ""
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
    """The case that a trace makes. Its id comes from the task's kind and content, so one task makes one case, and one for each turn.

    Its baseline is what the policy scored when it failed.

    Args:
        start: the state of its episode that the case begins with, in place of the task.
        supplied: what an imported trace does not hold.

    Raises `UserError` for a trace that does not hold its task, and for a fault, which tells nothing about a policy.
    """
    task = trace.task
    if task is None:
        task = task_from_trace(trace, supplied or UserParts())
    if trace.why is CaptureReason.FAULT:
        raise UserError(
            f"trace {trace.id} is a fault of the infrastructure or the task, not a failure of the policy",
            fix="promote others: agentrl failures list RUN shows why each was kept",
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


def _baseline(trace: Trace) -> Baseline | None:
    """Of the one attempt that there is. None: nothing scored it, or several versions sampled it."""
    value = None if trace.score is None else trace.score.value
    if value is None or not math.isfinite(value) or len(trace.versions) > 1:
        return None
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Baseline(model=trace.origin.get("model", ""), version=next(iter(trace.versions), None), scores=(value,), at=at)


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
    """Adds a case for each trace to the suite in a folder, made where there is none, but for tasks that are in it already.

    A case that begins in the middle is in it where one is that begins with the same tokens.

    Args:
        note: why these are worth keeping; `by`: who says so.
        threshold: the mean score that the attempts at each case must reach; None: what an evaluation says.
        repeats: attempts at each case in an evaluation; None: what the suite says.
        starts: trace -> the state that its case begins with; those of no other begin with their task.
        supplied: what imported traces do not hold; None: they make no cases.

    Raises `UserError` for a trace that makes no case, before any is written.
    """
    check_attempt_options(repeats=repeats, threshold=threshold)
    given = {"note": note, "by": by, "threshold": threshold, "repeats": repeats}
    cases = [
        (trace, case_from_trace(trace, start=starts.get(trace.id), supplied=supplied, **given))  # type: ignore[arg-type]
        for trace in traces
    ]
    known = list(load_suite(suite).cases) if any((suite / "cases").glob("*.json")) else []
    done: list[Promotion] = []
    for trace, case in cases:
        found = WithheldTasks(one for one in known if _begin(one) == _begin(case)).match(case.task)
        if found is not None and found[1] is Overlap.SAME:
            done.append(Promotion(trace=trace.id, case=found[0].id, likeness=Overlap.SAME))
            continue
        made = Promotion(trace=trace.id, case=case.id, path=save_case(suite, case))
        done.append(made if found is None else replace(made, case=found[0].id, likeness=found[1]))
        known.append(case)
    return done


def _begin(case: Case) -> tuple[tuple[int, ...], ...]:
    """The tokens that a case begins with; none: with its task."""
    if case.start is None:
        return ()
    return (*(ids for turn in case.start.trajectories[0].turns for ids in (turn.prompt_ids, turn.completion_ids)), *case.start.prompt_ids)

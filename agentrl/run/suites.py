"""Evaluations of suites: every case asked anew, as often as it says, in live sandboxes and judged as training is."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import agentrl
from agentrl.compare import About, Attempt, Results, results
from agentrl.compare.results import suite_sha256
from agentrl.failure.case import Case, Suite
from agentrl.failure.digest import write_digest
from agentrl.observe.left_out import reason_of
from agentrl.protocols import SandboxBackend
from agentrl.recipe import Recipe
from agentrl.records import PolicyVersion, ScoredEpisode, Task
from agentrl.rollout import GroupRunner
from agentrl.run.ending import kept_going
from agentrl.run.folder import Start
from agentrl.run.opening import Run, opened
from agentrl.run.preflight import Checked, check_suite
from agentrl.run.toolsource import declared
from agentrl.run.transcript import transcript

FOLDER = "suite"
"""Of a run folder: where `agentrl eval --suite` keeps the evaluation."""

OnDone = Callable[[int, int], None]
OnScored = Callable[[Task, ScoredEpisode], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One attempt at a case, and the episode in words."""

    attempt: Attempt
    words: dict[str, Any]


async def prepare(suite: Suite, sandboxes: SandboxBackend) -> None:
    """Makes the images of a suite's cases, each once."""
    specs = {(case.task.sandbox.image, case.task.sandbox.runtime): case.task.sandbox for case in suite.cases}
    async with asyncio.TaskGroup() as making:
        for spec in specs.values():
            making.create_task(sandboxes.prepare(spec))


async def try_cases(
    runner: GroupRunner,
    cases: Sequence[Case],
    numbers: range,
    *,
    phase: str,
    version: int,
    again: bool = False,
    on_done: OnDone = lambda done, total: None,
    on_scored: OnScored = lambda task, scored: None,
) -> tuple[Tried, ...]:
    """Attempts `numbers` at each case, in the order of the cases.

    An attempt that any other version than `version` has sampled a token of has no score: it says nothing about this one.

    Raises:
        ExceptionGroup: of `SandboxUnavailable`, where no sandbox of this kind can be opened on this machine at all.
    """
    done, total = 0, len(cases) * len(numbers)

    async def one(case: Case, number: int) -> Tried:
        nonlocal done
        scored = await runner.episode(case.task, name=f"{phase}-{case.id}-r{number}")
        done += 1
        on_done(done, total)
        on_scored(case.task, scored)
        return tried(case, number, scored, phase=phase, version=version, again=again)

    async with asyncio.TaskGroup() as running:
        jobs = [running.create_task(one(case, number)) for case in cases for number in numbers]
    return tuple(job.result() for job in jobs)


def about(recipe: Recipe, suite: Suite, version: PolicyVersion, *, repeats: int, threshold: float, began: float) -> About:
    """Where an evaluation comes from. `began`: monotonic seconds."""
    return About(
        suite=suite.name,
        suite_sha256=suite_sha256({case.id: case.task.key for case in suite.cases}),
        cases=len(suite.cases),
        repeats=repeats,
        model=recipe.policy.model,
        version=version.number,
        sha256=version.sha256,
        recipe=recipe.name,
        recipe_sha256=hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
        sampling=dataclasses.asdict(recipe.evaluation.sampling),
        seed=recipe.seed,
        threshold=threshold,
        agentrl=agentrl.__version__,
        at=now(),
        wall_s=time.monotonic() - began,
    )


def evaluation_runner(run: Run) -> GroupRunner:
    """The run's runner with the sampling of evaluations."""
    return replace(run.groups, runner=replace(run.groups.runner, sampling=run.recipe.evaluation.sampling))


async def evaluate_suite(
    recipe: Recipe, start: Start, checked: Checked, suite: Suite, *, repeats: int, threshold: float, root: Path, console: bool = True
) -> Results:
    """Serves the recipe's model, evaluates it on a suite and keeps the result in `suite/` of the run folder. For callers: see
    `agentrl.run.loop.train`. Raises `PluginError` before anything starts, for a case whose verifier or tool does not resolve."""
    check_suite(suite, checked.scorer, declared(recipe.tools, root))
    async with opened(recipe, start, checked, root=root, console=console) as run:
        run.tracker.stage("start", "server and sandbox images")
        base = run.registry.get(0)
        assert base is not None, "version 0 was registered"
        async with asyncio.TaskGroup() as starting:
            starting.create_task(prepare(suite, run.sandboxes))
            starting.create_task(run.served.start(base))
        run.tracker.stage(f"evaluate {suite.name}", f"{len(suite.cases)} cases, {repeats} attempts each")
        began = time.monotonic()
        run.capture.begin("eval")
        async with asyncio.TaskGroup() as parts:
            watcher = parts.create_task(run.served.watch(on_loss=run.learner.kill))
            tried = await try_cases(
                evaluation_runner(run),
                suite.cases,
                range(repeats),
                phase="eval",
                version=0,
                on_done=run.tracker.evaluating,
                on_scored=partial(run.capture.episode, phase="eval", step=0),
            )
            watcher.cancel()
        origin = about(recipe, suite, base, repeats=repeats, threshold=threshold, began=began)
        found = Results(about=origin, attempts=tuple(one.attempt for one in tried))
        results.save(start.folder / FOLDER, found, words_of(tried))
    with kept_going(start.folder, "the digest of failures"):
        write_digest(start.folder)
    return found


def words_of(tried: Iterable[Tried]) -> list[dict[str, Any]]:
    """The episodes in words."""
    return [one.words for one in tried]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def tried(case: Case, number: int, scored: ScoredEpisode, *, phase: str, version: int | None, again: bool = False) -> Tried:
    """The record of an attempt. `version`: the one that may have sampled its tokens; None: any may."""
    episode, value = scored.episode, scored.score.value
    words = transcript(case.task, scored, phase=phase, step=version or 0)
    others = sorted({span.version for one in episode.trajectories for turn in one.turns for span in turn.versions} - {version})
    reason = reason_of(scored)
    if others and version is not None:
        reason = f"version {', '.join(map(str, others))} sampled some of it, not {version} alone"
    counts = not reason and value is not None and abs(value) <= results.LARGEST_SCORE
    attempt = Attempt(
        case=case.id,
        task_key=case.task.key,
        number=number,
        episode=episode.id,
        score=value if counts else None,
        reason="" if counts else reason or "the score is not finite, or too large for a mean",
        again=again,
        tokens=episode.completion_tokens,
        turns=sum(len(one.turns) for one in episode.trajectories),
        wall_s=episode.wall_s,
        ended=str(words["stop_reason"] or ""),
        versions=tuple(words["versions"]),
    )
    return Tried(attempt=attempt, words={"episode": episode.id, "case": case.id, "attempt": number, **words})

"""Evaluations of suites: every case asked anew, as often as it says, in live sandboxes and judged as training is."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import agentrl
from agentrl.agent.run_tools import declared_tools
from agentrl.base import user_code
from agentrl.config.recipe import Recipe
from agentrl.errors import SandboxUnavailable, UserError
from agentrl.evaluation import results
from agentrl.evaluation.replay import check_start_tokens, starts_mid_episode
from agentrl.evaluation.results import CaseAttempt, EvaluationInfo, SuiteResults, suite_sha256
from agentrl.failure.case import Case, Suite
from agentrl.failure.digest import write_digest
from agentrl.observe.exclusions import exclusion_reason
from agentrl.protocols import SandboxBackend
from agentrl.records import Blame, Episode, Failure, PolicyVersion, SandboxSpec, Score, ScoredEpisode, Task, Trajectory
from agentrl.rollout import GroupRunner
from agentrl.session.ending import warn_on_error
from agentrl.session.folder import RunStart
from agentrl.session.opening import Run, open_run
from agentrl.session.preflight import PreflightResult, check_suite, open_chat
from agentrl.session.transcript import transcript

SUITE_FOLDER = "suite"
"""Of a run folder: where `agentrl eval --suite` keeps the evaluation."""

OnDone = Callable[[int, int], None]
OnScored = Callable[[Task, ScoredEpisode], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteAttempt:
    """One attempt at a case, and the episode in words."""

    attempt: CaseAttempt
    transcript: dict[str, Any]


BrokenImages = Mapping[tuple[str, str], str]
"""(image, runtime) -> why it cannot be made."""


async def prepare_images(suites: Iterable[Suite], sandboxes: SandboxBackend) -> BrokenImages:
    """Makes the images of suites' cases, each once. Those that cannot be made take their own cases out, and no others.

    Raises:
        ExceptionGroup: of `SandboxUnavailable`, where no sandbox of this kind can be opened on this machine at all.
    """
    specs = {_image(case): case.task.sandbox for suite in suites for case in suite.cases}
    broken: dict[tuple[str, str], str] = {}

    async def one(image: tuple[str, str], spec: SandboxSpec) -> None:
        try:
            await sandboxes.prepare(spec)
        except SandboxUnavailable:
            raise
        except UserError as error:
            broken[image] = user_code.error_text(error)

    async with asyncio.TaskGroup() as making:
        for image, spec in specs.items():
            making.create_task(one(image, spec))
    return broken


def unrunnable_attempt(case: Case, name: str, broken: BrokenImages) -> ScoredEpisode | None:
    """The attempt that a case cannot have, because its image is gone; None where it can."""
    why = broken.get(_image(case))
    if why is None:
        return None
    fault = Failure(stage="task", blame=Blame.TASK, kind="image", message=why)
    nothing = Trajectory(agent="main", turns=(), stop_reason="failed")
    episode = Episode(id=f"{name}-a0", task_id=case.task.id, task_key=case.task.key, trajectories=(nothing,), failures=(fault,))
    return ScoredEpisode(episode=episode, score=Score(value=None, reason=f"left out: task image: {why}", blame=Blame.TASK))


def _image(case: Case) -> tuple[str, str]:
    return case.task.sandbox.image, case.task.sandbox.runtime


async def run_cases(
    runner: GroupRunner,
    cases: Sequence[Case],
    numbers: Callable[[Case], range],
    *,
    phase: str,
    version: int,
    broken: BrokenImages,
    again: bool = False,
    on_done: OnDone = lambda done, total: None,
    on_scored: OnScored = lambda task, scored: None,
) -> tuple[SuiteAttempt, ...]:
    """The attempts at each case that `numbers` names, in the order of the cases.

    An attempt that any other version than `version` has sampled a token of has no score: it says nothing about this one.

    Raises:
        ExceptionGroup: of `SandboxUnavailable`, where no sandbox of this kind can be opened on this machine at all.
    """
    done, total = 0, sum(len(numbers(case)) for case in cases)

    async def one(case: Case, number: int) -> SuiteAttempt:
        nonlocal done
        name = f"{phase}-{case.id}-r{number}"
        scored = unrunnable_attempt(case, name, broken) or await runner.run_episode(case.task, name=name, start=case.start, always=True)
        done += 1
        on_done(done, total)
        on_scored(case.task, scored)
        return suite_attempt(case, number, scored, phase=phase, version=version, again=again)

    async with asyncio.TaskGroup() as running:
        jobs = [running.create_task(one(case, number)) for case in cases for number in numbers(case)]
    return tuple(job.result() for job in jobs)


def evaluation_info(
    recipe: Recipe, suite: Suite, version: PolicyVersion, *, repeats: int, threshold: float, began: float
) -> EvaluationInfo:
    """Where an evaluation comes from. `began`: monotonic seconds."""
    return EvaluationInfo(
        suite=suite.name,
        suite_sha256=suite_sha256({case.id: case.key for case in suite.cases}),
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
        thresholds=case_thresholds(suite),
        agentrl=agentrl.__version__,
        at=utc_now(),
        wall_s=time.monotonic() - began,
    )


def version_number(model: str) -> int:
    """The number of a run's version whose folder a model is (`--model RUN@VERSION`); 0 for any other model."""
    folder = Path(model)
    return int(folder.name) if folder.parent.name == "versions" and folder.name.isdecimal() else 0


def case_repeats(case: Case, otherwise: int) -> int:
    """Attempts at a case in an evaluation: its own number, else that of the evaluation."""
    return otherwise if case.repeats is None else case.repeats


def case_thresholds(suite: Suite) -> dict[str, float]:
    """The thresholds of the cases that have one of their own."""
    return {case.id: case.threshold for case in suite.cases if case.threshold is not None}


def evaluation_runner(run: Run) -> GroupRunner:
    """The run's runner with the sampling of evaluations."""
    return replace(run.groups, runner=replace(run.groups.runner, sampling=run.recipe.evaluation.sampling))


async def evaluate_suite(
    recipe: Recipe,
    start: RunStart,
    checked: PreflightResult,
    suite: Suite,
    *,
    repeats: int | None,
    threshold: float,
    root: Path,
    console: bool = True,
) -> SuiteResults:
    """Serves the recipe's model, evaluates it on a suite and keeps the result in `suite/` of the run folder. For callers: see
    `agentrl.run.loop.train`.

    Args:
        repeats: attempts at each case; None: as the case says, else the suite.

    Raises `PluginError` before anything starts, for a case whose verifier or tool does not resolve.
    """
    check_suite(suite, checked.scorer, declared_tools(recipe.tools, root), root=root)
    async with open_run(recipe, start, checked, root=root, console=console) as run:
        run.tracker.stage("start", "server and sandbox images")
        base = run.registry.get(0)
        assert base is not None, "version 0 was registered"
        async with asyncio.TaskGroup() as starting:
            making = starting.create_task(prepare_images([suite], run.sandboxes))
            starting.create_task(run.served.start(base))
            starting.create_task(run.judges.ready())
        if starts_mid_episode([suite]):
            chat = open_chat(start.folder / "versions" / "000000", policy=recipe.policy)
            check_start_tokens([suite], chat, run.groups.runner.tools, recipe.rollout)
        total = sum(repeats or case_repeats(case, suite.repeats) for case in suite.cases)
        run.tracker.stage(f"evaluate {suite.name}", f"{len(suite.cases)} cases, {total} attempts")
        began = time.monotonic()
        run.capture.reset_phase("eval")
        async with asyncio.TaskGroup() as parts:
            watcher = parts.create_task(run.served.watch(on_loss=run.learner.kill))
            tried = await run_cases(
                evaluation_runner(run),
                suite.cases,
                lambda case: range(repeats or case_repeats(case, suite.repeats)),
                phase="eval",
                version=0,
                broken=making.result(),
                on_done=run.tracker.evaluating,
                on_scored=partial(run.capture.capture_episode, phase="eval", step=0),
            )
            watcher.cancel()
        origin = evaluation_info(recipe, suite, base, repeats=repeats or suite.repeats, threshold=threshold, began=began)
        origin = replace(origin, version=version_number(recipe.policy.model))
        found = SuiteResults(about=origin, attempts=tuple(one.attempt for one in tried))
        results.save_results(start.folder / SUITE_FOLDER, found, transcripts_of(tried))
    with warn_on_error(start.folder, "the digest of failures"):
        write_digest(start.folder)
    return found


def transcripts_of(tried: Iterable[SuiteAttempt]) -> list[dict[str, Any]]:
    """The episodes in words."""
    return [one.transcript for one in tried]


def utc_now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def suite_attempt(case: Case, number: int, scored: ScoredEpisode, *, phase: str, version: int | None, again: bool = False) -> SuiteAttempt:
    """The record of an attempt. `version`: the one that may have sampled its tokens; None: any may."""
    episode, value = scored.episode, scored.score.value
    words = transcript(case.task, scored, phase=phase, step=version or 0)
    others = sorted({span.version for one in episode.trajectories for turn in one.own_turns for span in turn.versions} - {version})
    reason = exclusion_reason(scored)
    if others and version is not None:
        reason = f"version {', '.join(map(str, others))} sampled some of it, not {version} alone"
    counts = not reason and value is not None and abs(value) <= results.LARGEST_SCORE
    attempt = CaseAttempt(
        case=case.id,
        task_key=case.key,
        number=number,
        episode=episode.id,
        score=value if counts else None,
        reason="" if counts else reason or "the score is not finite, or too large for a mean",
        again=again,
        tokens=episode.completion_tokens,
        turns=sum(len(one.own_turns) for one in episode.trajectories),
        wall_s=episode.wall_s,
        ended=str(words["stop_reason"] or ""),
        versions=tuple(words["versions"]),
    )
    return SuiteAttempt(attempt=attempt, transcript={"episode": episode.id, "case": case.id, "attempt": number, **words})

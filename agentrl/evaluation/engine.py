"""The evaluation engine, which runs attempts at tasks in live sandboxes, scores them as in training, and records them.

The evaluations of held-out splits (`splits`), of suites (`suites`) and of the gate (`agentrl.gate.gate`) plan attempts and run them here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import agentrl
from agentrl.base import user_code
from agentrl.config.recipe import Recipe
from agentrl.errors import SandboxUnavailable, UserError
from agentrl.evaluation import results
from agentrl.evaluation.comparison import Scores
from agentrl.evaluation.results import CaseAttempt, EvaluationInfo, suite_sha256
from agentrl.experience import DriverStore
from agentrl.failure.case import Case, Suite
from agentrl.observe.exclusions import exclusion_reason
from agentrl.protocols import EvaluationStore, ExperienceStore, SandboxBackend
from agentrl.records import Blame, EpisodeState, Failure, Group, PolicyVersion, SandboxSpec, ScoredEpisode, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import GroupRunner, excluded_attempt
from agentrl.session.transcript import transcript

R = TypeVar("R")

Slot = tuple[Case, int]
"""A case and the number of an attempt at it."""
ScoredListener = Callable[[Task, ScoredEpisode], Awaitable[None]]
"""Called with each task and its scored episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttempt:
    """An attempt that an evaluation will run. If `fault` is set, the attempt is not run but recorded as excluded."""

    name: str  # name of its episode
    task: Task | None  # None if the task cannot be created
    start: EpisodeState | None = None
    fault: Failure | None = None


async def run_attempts(
    runner: GroupRunner, planned: Sequence[PlannedAttempt], record: Callable[[PlannedAttempt, ScoredEpisode], Awaitable[R]]
) -> list[R]:
    """Runs attempts concurrently. Calls `record` for each attempt as soon as it is scored or excluded.

    Returns the results of `record`, in the planned order.

    Raises:
        ExceptionGroup: contains the errors of `record`, and `SandboxUnavailable` if this machine cannot open any sandbox of the required
            kind.
    """

    async def run(attempt: PlannedAttempt) -> R:
        task = attempt.task
        if task is not None and attempt.fault is None:
            return await record(attempt, await runner.run_episode(task, name=attempt.name, start=attempt.start, always=True))
        assert attempt.fault is not None, "an attempt without a task has a fault"
        return await record(attempt, excluded_attempt(attempt.name, *(("", "") if task is None else (task.id, task.key)), attempt.fault))

    async with asyncio.TaskGroup() as running:
        jobs = [running.create_task(run(attempt)) for attempt in planned]
    return [job.result() for job in jobs]


def evaluation_runner(groups: GroupRunner, sampling: Sampling) -> GroupRunner:
    """Returns a copy of a run's group runner that uses the sampling settings of evaluations."""
    return replace(groups, runner=replace(groups.runner, sampling=sampling))


BrokenImages = Mapping[tuple[str, str], str]
"""(image, runtime) -> reason why the image cannot be built."""


async def prepare_images(suites: Iterable[Suite], sandboxes: SandboxBackend) -> BrokenImages:
    """Builds the images of the suites' cases. Returns the images that cannot be built.

    The evaluation excludes only the cases that need one of these images.

    Raises:
        ExceptionGroup: contains `SandboxUnavailable` if this machine cannot open any sandbox of the required kind, and infrastructure
            errors of builds.
    """
    specs = {_image(case): case.task.sandbox for suite in suites for case in suite.cases if case.task.sandbox is not None}
    broken: dict[tuple[str, str], str] = {}

    async def build(image: tuple[str, str], spec: SandboxSpec) -> None:
        try:
            await sandboxes.prepare(spec)
        except SandboxUnavailable:
            raise
        except UserError as error:
            broken[image] = user_code.error_text(error)

    async with asyncio.TaskGroup() as building:
        for image, spec in specs.items():
            building.create_task(build(image, spec))
    return broken


def plan_case(case: Case, name: str, broken: BrokenImages) -> PlannedAttempt:
    """Plans an attempt at a case. The attempt is excluded if the case's image cannot be built."""
    why = broken.get(_image(case))
    fault = None if why is None else Failure(stage="task", blame=Blame.TASK, kind="image", message=why)
    return PlannedAttempt(name=name, task=case.task, start=case.start, fault=fault)


def _image(case: Case) -> tuple[str, str]:
    spec = case.task.sandbox
    return ("", "") if spec is None else (spec.image, spec.runtime)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteAttempt:
    """The record of one attempt at a case, and its transcript."""

    attempt: CaseAttempt
    transcript: dict[str, Any]


async def run_cases(
    runner: GroupRunner,
    slots: Iterable[Slot],
    *,
    phase: str,
    version: int,
    broken: BrokenImages,
    again: bool = False,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    on_scored: ScoredListener | None = None,
) -> tuple[SuiteAttempt, ...]:
    """Runs attempts at cases. Returns the records of the attempts, in the order of `slots`.

    An attempt that contains tokens from a version other than `version` has no score. Raises the same errors as `run_attempts`.
    """
    plan = {f"{phase}-{case.id}-r{number}": (case, number) for case, number in slots}
    done = 0

    async def record(attempt: PlannedAttempt, scored: ScoredEpisode) -> SuiteAttempt:
        nonlocal done
        case, number = plan[attempt.name]
        done += 1
        on_done(done, len(plan))
        if on_scored is not None:
            await on_scored(case.task, scored)
        return suite_attempt(case, number, scored, phase=phase, version=version, again=again)  # without the episode's tokens

    return tuple(await run_attempts(runner, [plan_case(case, name, broken) for name, (case, _) in plan.items()], record))


def evaluation_info(
    recipe: Recipe, suite: Suite, version: PolicyVersion, *, repeats: int, threshold: float, began: float
) -> EvaluationInfo:
    """Returns the metadata of an evaluation. `began` is the time of its start in monotonic seconds."""
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
        sampling=dataclasses.asdict(recipe.evaluation.distribution),
        seed=recipe.seed,
        threshold=threshold,
        thresholds=case_thresholds(suite),
        agentrl=agentrl.__version__,
        at=utc_now(),
        wall_s=time.monotonic() - began,
    )


def case_repeats(case: Case, default: int) -> int:
    """Returns the number of attempts at a case: `case.repeats` or, if that is None, `default`."""
    return default if case.repeats is None else case.repeats


def case_thresholds(suite: Suite) -> dict[str, float]:
    """Returns a mapping case -> threshold for the cases that have a threshold."""
    return {case.id: case.threshold for case in suite.cases if case.threshold is not None}


def utc_now() -> str:
    """Returns the current UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def suite_attempt(case: Case, number: int, scored: ScoredEpisode, *, phase: str, version: int | None, again: bool = False) -> SuiteAttempt:
    """Returns the record of an attempt.

    `version` is the only version that may have sampled the attempt's tokens; None allows any version. If another version sampled some of
    them, the attempt has no score.
    """
    episode, value = scored.episode, scored.score.value
    words = transcript(case.task, scored, phase=phase, step=version or 0)
    others = sorted(
        {span.version for trajectory in episode.trajectories for turn in trajectory.own_turns for span in turn.versions} - {version}
    )
    reason = exclusion_reason(scored)
    if others and version is not None:
        reason = f"version {', '.join(map(str, others))} sampled some of its tokens, not only version {version}"
    counts = not reason and value is not None and abs(value) <= results.LARGEST_SCORE
    attempt = CaseAttempt(
        case=case.id,
        task_key=case.key,
        number=number,
        episode=episode.id,
        score=value if counts else None,
        reason="" if counts else reason or "the score is not finite or too large for a mean",
        again=again,
        tokens=episode.completion_tokens,
        turns=sum(len(trajectory.own_turns) for trajectory in episode.trajectories),
        wall_s=episode.wall_s,
        ended=str(words["stop_reason"] or ""),
        versions=tuple(words["versions"]),
    )
    return SuiteAttempt(attempt=attempt, transcript={"episode": episode.id, "case": case.id, "attempt": number, **words})


def scores_by_case(attempts: Iterable[SuiteAttempt]) -> Scores:
    """Returns a mapping case -> scores of its attempts, in order."""
    scores: dict[str, list[float | None]] = {}
    for attempt in attempts:
        scores.setdefault(attempt.attempt.case, []).append(attempt.attempt.score)
    return scores


@dataclass(frozen=True, slots=True)
class StoredEpisodes:
    """Stores the evaluation episodes of a run if its store is an `EvaluationStore`, and otherwise does nothing.

    `begin` deletes the episodes of an interrupted evaluation.
    """

    store: DriverStore

    async def begin(self, phase: str) -> None:
        """Deletes the stored evaluation episodes of a phase."""
        await self.store.call(lambda store: store.delete_evaluated(phase) if isinstance(store, EvaluationStore) else None)

    async def add(self, phase: str, step: int, task: Task, scored: ScoredEpisode) -> None:
        """Stores an episode durably. Raises `StoreError` if the episode cannot be stored.

        Args:
            step: learner step that produced the evaluated version.
        """
        group = Group(index=0, task_id=task.id, task_key=task.key, episodes=(scored,)).with_task(task)

        def put(store: ExperienceStore) -> None:
            if isinstance(store, EvaluationStore):
                store.put_evaluated(phase, step, group)

        await self.store.call(put)

"""Compares two versions of a run by new attempts at the same cases, and stops as soon as the verdict is clear.

    block of cases -> attempts by one version -> load the other version -> attempts by that version -> verdict, or the next block

The verdict comes from an interval that is valid after every block (`agentrl.evaluation.statistics.anytime_interval`), so stopping early
does not raise the error rate of the verdict: a version that is not worse receives the verdict `worse` with a probability of at most
alpha/2. The cases are tried in random order, and are treated as a random sample of the cases for which the version will be used.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentrl.config.recipe import load
from agentrl.errors import UserError
from agentrl.evaluation import results
from agentrl.evaluation.comparison import ComparisonVerdict, pair_scores
from agentrl.evaluation.engine import Slot, SuiteAttempt, evaluation_info, run_cases, scores_by_case
from agentrl.evaluation.open_policy import OpenPolicy, PreparedEvaluation, held_out_suite, open_policy, prepare_evaluation
from agentrl.evaluation.policies import NamedPolicy, PolicySource
from agentrl.evaluation.results import SuiteResults
from agentrl.evaluation.statistics import Interval, anytime_interval
from agentrl.failure.case import Case, Suite
from agentrl.failure.digest import write_digest
from agentrl.plugins.references import project_root
from agentrl.protocols import VersionRegistry
from agentrl.records import PolicyVersion, ScoredEpisode, Task, VersionState
from agentrl.session.ending import warn_on_error
from agentrl.session.models import copy_version
from agentrl.session.version_changes import known_version
from agentrl.session.versions import open_registry

Result = TypeVar("Result")
_PHASES = ("before", "after")
_BLOCK = 16  # cases between two verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceSoFar:
    """The mean difference between the scores of two versions on the cases tried so far: the version after minus the version before."""

    verdict: ComparisonVerdict  # `not enough data` means that no verdict is possible yet or, in the final result, that no case is left
    interval: Interval  # valid for any number of cases
    before: float
    after: float
    cases: int  # number of cases that are scored on both sides
    unscored: int  # pairs of attempts that one side did not score
    most: int  # maximum number of cases
    lost: tuple[str, ...]  # cases with a lower mean score after
    gained: tuple[str, ...]


def difference_so_far(
    before: Sequence[SuiteAttempt], after: Sequence[SuiteAttempt], *, alpha: float, margin: float, most: int
) -> DifferenceSoFar:
    """Compares the attempts by two versions. Both sequences must be in the order in which the cases were tried.

    The verdict is `worse` or `better` if the interval at level 1 - alpha excludes 0. Otherwise it is `same` if the interval is within
    -margin and +margin, and `not enough data` if it is not. Raises `UserError` if a score is outside [0, 1].
    """
    both = pair_scores(scores_by_case(before), scores_by_case(after))
    by_case = {pair.case: pair for pair in both.pairs}
    ordered = [by_case[case] for case in dict.fromkeys(result.attempt.case for result in before) if case in by_case]
    changes = [float(pair.difference) for pair in ordered]
    try:
        interval = anytime_interval(changes, level=1 - alpha)
    except ValueError:
        raise UserError("the comparison needs scores from 0 to 1", fix="use agentrl eval for both versions, then agentrl compare") from None
    verdict = ComparisonVerdict.NOT_ENOUGH
    if interval.high <= 0:
        verdict = ComparisonVerdict.WORSE
    elif interval.low >= 0:
        verdict = ComparisonVerdict.BETTER
    elif -margin < interval.low and interval.high < margin:
        verdict = ComparisonVerdict.SAME
    count = max(1, len(ordered))
    return DifferenceSoFar(
        verdict=verdict,
        interval=interval,
        before=sum(sum(pair.before) / len(pair.before) for pair in ordered) / count,
        after=sum(sum(pair.after) / len(pair.after) for pair in ordered) / count,
        cases=len(ordered),
        unscored=both.unscored,
        most=most,
        lost=tuple(pair.case for pair in ordered if pair.difference < 0),
        gained=tuple(pair.case for pair in ordered if pair.difference > 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionComparison:
    """Two versions of a run that are compared, and the prepared evaluation that runs both of them."""

    run: Path
    numbers: tuple[int, int]
    prepared: PreparedEvaluation
    alpha: float
    margin: float

    @property
    def suite(self) -> Suite:
        """The suite whose cases are compared."""
        return self.prepared.suites[0]

    @property
    def folders(self) -> tuple[Path, Path]:
        """The folders to which the attempts by each version are written and from which `agentrl compare` reads them."""
        before, after = (self.prepared.start.folder / name for name in _PHASES)
        return before, after

    def repeats_of(self, case: Case) -> int:
        """Returns the number of attempts by each version at a case."""
        return self.prepared.repeats_of(self.suite, case)


Trial = Callable[[VersionComparison, OpenPolicy, tuple[PolicyVersion, PolicyVersion]], Awaitable[Result]]
"""Runs attempts by both versions of an open policy."""


@contextmanager
def prepare_comparison(
    run: Path,
    numbers: tuple[int, int],
    suite: Suite | None,
    *,
    overrides: Sequence[str] = (),
    cases: int | None = None,
    repeats: int | None = None,
    alpha: float,
    margin: float,
    folder: Path | None = None,
) -> Iterator[VersionComparison]:
    """Claims a folder for the comparison and runs all checks that take little time.

    Args:
        suite: the cases; None means the held-out tasks that the run's recipe evaluates.
        cases: maximum number of cases; None means no maximum.
        folder: run folder of the comparison; None means a folder with the first unused name.

    Raises `UserError`, for example if a version is unknown or was deleted, and `StoreError` if its weights are missing or damaged.
    """
    if not 0 < alpha < 0.5 or not 0 <= margin < 1:
        raise UserError(f"--alpha {alpha:g} or --margin {margin:g} is out of range", fix="use 0 < alpha < 0.5 and 0 <= margin < 1")
    registry = open_registry(run)
    for number in numbers:
        version = known_version(registry, number)
        if not (registry.path(version) / "probe.json").is_file():
            raise UserError(
                f"version {number} of {run} was deleted or never published", fix=f"choose a different version: agentrl versions list {run}"
            )
        registry.verify(version)
    base = run.resolve() / "versions" / "000000"  # the server starts with this version, because adapters are loaded on top of it
    policy = NamedPolicy(source=PolicySource.VERSION, name=f"{run}@0", model=str(base), run=run.resolve())
    own, overrides = None, ("serving.weight_transfer=file", *overrides)  # no learner sends weights
    if suite is None:
        root, recipe = project_root(Path.cwd() / "recipe"), load(run / "recipe.json")
        fewer_cases = {} if cases is None else {"evaluation.heldout": cases, "evaluation.heldout_real": 0}
        recipe = recipe.but(
            {"policy.model": str(base), "policy.chat_template": None, "gate": None, "trackers": ("terminal",), **fewer_cases}
        )
        own, suite = (root, recipe.but(*overrides)), held_out_suite(recipe.but(*overrides), root)
    elif cases is not None:
        suite = dataclasses.replace(suite, cases=suite.cases[:cases])
    with prepare_evaluation(policy, [suite], overrides=overrides, repeats=repeats, run_dir=folder, own=own) as prepared:
        yield VersionComparison(run=run, numbers=numbers, prepared=prepared, alpha=alpha, margin=margin)


async def run_comparison(comparison: VersionComparison, trial: Trial[Result], *, console: bool = True) -> Result:
    """Serves both versions and returns the result of `trial`, which is `try_blocks` or `agentrl.evaluation.canary.run_canary`.

    Raises `InfrastructureError` if the server is permanently lost, and `SwapError` if the server rejects a version.
    """
    async with open_policy(comparison.prepared, console=console) as policy:
        assert policy.run is not None, "versions are served here"
        before, after = await asyncio.to_thread(_copy_versions, comparison, policy.run.registry)
        result = await trial(comparison, policy, (before, after))
    with warn_on_error(comparison.prepared.start.folder, "the digest of failures"):
        write_digest(comparison.prepared.start.folder)
    return result


def _copy_versions(comparison: VersionComparison, registry: VersionRegistry) -> list[PolicyVersion]:
    """Copies both versions into the folder of the comparison and registers them there."""
    pair = []
    for number, compared in enumerate(comparison.numbers, 1):
        source = known_version(open_registry(comparison.run), compared)
        target = f"versions/{number:06d}"
        copy_version(comparison.run / source.folder, comparison.prepared.start.folder / target, weights=source.weights)
        pair.append(dataclasses.replace(source, number=number, parent=0, folder=target, state=VersionState.CANDIDATE))
        registry.add(pair[-1])
    return pair


async def try_blocks(
    comparison: VersionComparison,
    policy: OpenPolicy,
    pair: tuple[PolicyVersion, PolicyVersion],
    *,
    on_block: Callable[[DifferenceSoFar], None] = lambda so_far: None,
) -> DifferenceSoFar:
    """Runs blocks of cases with both versions of an open policy until the verdict is clear or no case is left.

    After the first block, each block starts with the version that is still loaded, to save a swap. The attempts are stored at the end.
    Raises `UserError`, and stores nothing, if a score is outside [0, 1].

    Args:
        on_block: called with the difference after each block.
    """
    began, cases = time.monotonic(), list(comparison.suite.cases)
    attempts: tuple[list[SuiteAttempt], list[SuiteAttempt]] = [], []
    random.Random(comparison.prepared.recipe.seed).shuffle(cases)
    decided = difference_so_far((), (), alpha=comparison.alpha, margin=comparison.margin, most=len(cases))
    for block in range(0, len(cases), _BLOCK):
        slots = [(case, number) for case in cases[block : block + _BLOCK] for number in range(comparison.repeats_of(case))]
        for side in (0, 1) if block // _BLOCK % 2 == 0 else (1, 0):
            attempts[side].extend(await run_attempts_of(comparison, policy, pair[side], slots, side))
        decided = difference_so_far(attempts[0], attempts[1], alpha=comparison.alpha, margin=comparison.margin, most=len(cases))
        on_block(decided)
        if decided.verdict is not ComparisonVerdict.NOT_ENOUGH:
            break
    for side in (0, 1):
        await asyncio.to_thread(save_attempts, comparison, side, pair[side], attempts[side], began)
    return decided


def save_attempts(comparison: VersionComparison, side: int, version: PolicyVersion, attempts: Sequence[SuiteAttempt], began: float) -> None:
    """Writes the attempts by one version to its folder in the comparison. `began` is the start of the comparison in monotonic seconds."""
    prepared, number = comparison.prepared, comparison.numbers[side]
    repeats = prepared.repeats or comparison.suite.repeats
    info = evaluation_info(prepared.recipe, comparison.suite, version, repeats=repeats, threshold=prepared.threshold, began=began)
    info = dataclasses.replace(info, model=f"{comparison.run}@{number}", version=number)
    evaluation = SuiteResults(about=info, attempts=tuple(attempt.attempt for attempt in attempts))
    results.save_results(comparison.folders[side], evaluation, [attempt.transcript for attempt in attempts])


async def run_attempts_of(
    comparison: VersionComparison, policy: OpenPolicy, version: PolicyVersion, slots: Sequence[Slot], side: int
) -> tuple[SuiteAttempt, ...]:
    """Loads `version` if a different version is served, and runs attempts with it."""
    assert policy.run is not None, "versions are served here"
    if (policy.run.served.version, policy.run.served.sha256) != (version.number, version.sha256):
        await policy.run.served.swap(version)
    policy.tracker.stage("evaluate", f"version {comparison.numbers[side]}: {len({case.id for case, _ in slots})} cases")
    capture, phase, step = policy.capture.capture_episode, _PHASES[side], comparison.numbers[side]

    async def record(task: Task, scored: ScoredEpisode) -> None:
        await asyncio.to_thread(capture, task, scored, phase=phase, step=step)

    return await run_cases(
        policy.groups,
        slots,
        phase=phase,
        version=version.number,
        broken=policy.broken,
        on_done=policy.tracker.evaluating,
        on_scored=record,
    )

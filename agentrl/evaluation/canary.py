"""A canary: a candidate version runs a share of the attempts, and a sequential test decides whether it is promoted or rolled back.

    unit of 1 / share attempts -> the candidate runs one, chosen at random, and the baseline runs the others -> next unit, or the decision

Each attempt runs once, with one version. If a user-supplied agent is used, an attempt is one gateway session. Each unit yields one
observation, within [-1, 1]: the score of the candidate's attempt minus the mean score of the baseline's attempts. If both versions are
equally good, the expected value of an observation is 0, because the candidate's attempt is chosen at random. Two sequential tests
(`statistics.e_value`), which are valid after any number of observations, decide:

    promote    if the mean difference is significantly above -margin. A candidate that is worse by the margin or more is promoted with a
               probability of at most alpha / 2.
    roll back  if the mean difference is significantly below 0. A candidate that is not worse is rolled back with a probability of at most
               alpha / 2.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path

from agentrl.errors import UserError
from agentrl.evaluation.engine import SuiteAttempt
from agentrl.evaluation.open_policy import OpenPolicy
from agentrl.evaluation.statistics import Interval, anytime_interval, e_value
from agentrl.evaluation.versus import VersionComparison, run_attempts_of, save_attempts
from agentrl.failure.case import Case
from agentrl.records import PolicyVersion, VersionState
from agentrl.session.version_changes import has_checkpoint, is_driven, known_version, run_recipe
from agentrl.session.versions import open_registry

_BLOCK = 16  # the candidate's attempts between two tests
_LEAST_SCORED = Fraction(4, 5)  # minimum share of the observations that must be scored for a decision
_SIDES = BASELINE, CANDIDATE = 0, 1

SlotId = tuple[str, int]
"""The id of a case and the number of an attempt at it."""


class CanaryOutcome(StrEnum):
    """The result of a canary."""

    PROMOTE = "promote"
    ROLL_BACK = "roll back"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryUnit:
    """Consecutive attempts, of which the candidate runs one and the baseline runs the others."""

    candidate: SlotId
    baseline: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The mean scores and attempt counts of a canary so far, and the resulting decision."""

    outcome: CanaryOutcome
    interval: Interval  # of the mean difference; valid for any number of attempts
    baseline: float  # mean scores; 0 if no attempt is scored
    candidate: float
    attempts: tuple[int, int]  # number of attempts by the baseline, and by the candidate
    unscored: int  # observations for which the candidate or all baseline attempts have no score
    most: int  # maximum number of observations


def check_canary(run: Path, before: int, after: int) -> None:
    """Raises `UserError` unless a canary could both promote version `after` and roll back to version `before`."""
    registry = open_registry(run)
    baseline, candidate = known_version(registry, before), known_version(registry, after)
    if before >= after or VersionState.ROLLED_BACK in (baseline.state, candidate.state):
        raise UserError(
            f"version {after} of {run} cannot be a canary for version {before}: it must be newer, and neither may be rolled back",
            fix=f"choose other versions: agentrl versions list {run}",
        )
    if not has_checkpoint(run, before):
        raise UserError(f"version {before} of {run} has no intact checkpoint to return to", fix="before a canary, pin the versions to keep")
    if run_recipe(run).gate is None and is_driven(run):
        raise UserError(
            f"{run} is running without a gate, so a canary cannot decide its result", fix="wait until the run ends, or add a gate"
        )


def plan_units(cases: Sequence[Case], repeats_of: Callable[[Case], int], *, share: float, seed: int) -> tuple[CanaryUnit, ...]:
    """Returns the attempts of a canary in random order, divided into units of 1 / `share` attempts. An incomplete unit is dropped.

    Raises `UserError` if `share` is not 1 / 2, 1 / 3, ..., or if there are fewer than 1 / `share` attempts.
    """
    size = round(1 / share) if 0 < share <= 0.5 else 0
    if not size or abs(share * size - 1) > 0.01:
        raise UserError(f"the canary's share {share:g} is not one of 1/2, 1/3, 1/4, ...", fix="use --canary 0.2, for example")
    rng, slots = random.Random(seed), list[SlotId]()
    for number in range(max(map(repeats_of, cases), default=0)):
        turn = [(case.id, number) for case in cases if number < repeats_of(case)]
        rng.shuffle(turn)
        slots += turn
    units = []
    for start in range(0, len(slots) - size + 1, size):
        chosen, *others = rng.sample(slots[start : start + size], size)
        units.append(CanaryUnit(candidate=chosen, baseline=tuple(others)))
    if not units:
        raise UserError(
            f"a canary with share {share:g} needs {size} attempts, but there are only {len(slots)}", fix="raise --cases or --repeats"
        )
    return tuple(units)


def decide(differences: Sequence[float], *, planned: int, alpha: float, margin: float) -> CanaryOutcome:
    """Returns the decision after the observations `differences`.

    `planned` is the number of units so far, including those without an observation. The decision is `UNDECIDED` if fewer than 4/5 of these
    units have an observation. Raises `ValueError` if an observation is outside [-1, 1].
    """
    if len(differences) < _LEAST_SCORED * planned:
        return CanaryOutcome.UNDECIDED
    if e_value([-difference for difference in differences], null=margin) >= 2 / alpha:
        return CanaryOutcome.PROMOTE
    return CanaryOutcome.ROLL_BACK if e_value(differences) >= 2 / alpha else CanaryOutcome.UNDECIDED


async def run_canary(
    comparison: VersionComparison,
    policy: OpenPolicy,
    pair: tuple[PolicyVersion, PolicyVersion],
    *,
    share: float,
    on_block: Callable[[CanaryResult], None] = lambda so_far: None,
) -> CanaryResult:
    """Runs blocks of units with both versions of an open policy until there is a decision or no unit is left, and stores the attempts.

    Raises `UserError` in the same cases as `plan_units`, and, without storing the attempts, if an observation is outside [-1, 1].

    Args:
        pair: baseline and candidate.
        share: share of the attempts that the candidate runs.
        on_block: called with the result so far after each block.
    """
    began, by_id = time.monotonic(), {case.id: case for case in comparison.suite.cases}
    units = plan_units(comparison.suite.cases, comparison.repeats_of, share=share, seed=comparison.prepared.recipe.seed)
    attempts: tuple[list[SuiteAttempt], list[SuiteAttempt]] = [], []
    result = _result(comparison, units[:0], attempts, most=len(units))
    for start in range(0, len(units), _BLOCK):
        block = units[start : start + _BLOCK]
        wanted = [slot for unit in block for slot in unit.baseline], [unit.candidate for unit in block]
        for side in _SIDES if start // _BLOCK % 2 == 0 else _SIDES[::-1]:  # a block starts with the loaded version
            slots = [(by_id[case], number) for case, number in wanted[side]]
            attempts[side].extend(await run_attempts_of(comparison, policy, pair[side], slots, side))
        result = _result(comparison, units[: start + len(block)], attempts, most=len(units))
        on_block(result)
        if result.outcome is not CanaryOutcome.UNDECIDED:
            break
    for side in _SIDES:
        await asyncio.to_thread(save_attempts, comparison, side, pair[side], attempts[side], began)
    return result


def _result(
    comparison: VersionComparison, units: Sequence[CanaryUnit], attempts: tuple[list[SuiteAttempt], list[SuiteAttempt]], *, most: int
) -> CanaryResult:
    scores = [{(result.attempt.case, result.attempt.number): result.attempt.score for result in side} for side in attempts]
    differences = list[float]()
    for unit in units:
        score = scores[CANDIDATE][unit.candidate]
        others = [other for slot in unit.baseline if (other := scores[BASELINE][slot]) is not None]
        if score is not None and others:
            differences.append(score - statistics.fmean(others))
    try:
        outcome = decide(differences, planned=len(units), alpha=comparison.alpha, margin=comparison.margin)
        interval = anytime_interval(differences, level=1 - comparison.alpha)
    except ValueError:
        raise UserError("a canary needs scores from 0 to 1", fix="use agentrl eval for both versions, then agentrl compare") from None
    baseline, candidate = ([score for score in side.values() if score is not None] for side in scores)
    return CanaryResult(
        outcome=outcome,
        interval=interval,
        baseline=statistics.fmean(baseline or [0.0]),
        candidate=statistics.fmean(candidate or [0.0]),
        attempts=(len(attempts[BASELINE]), len(attempts[CANDIDATE])),
        unscored=len(units) - len(differences),
        most=most,
    )

"""Compares two policies by their paired scores on the same cases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from agentrl.base.numbers import exact_fraction, tolerance
from agentrl.evaluation.statistics import cases_needed, difference_interval, e_value, planned_spread, sign_flip_test

Scores = Mapping[str, Sequence[float | None]]
"""Case -> the scores of its attempts, in order; None means unscored."""

ALPHA, MARGIN = 0.05, 0.05
_SAMENESS_SQUARES = 3.5  # see `difference_interval`: even a frequent change may be absent from a few cases


class ComparisonVerdict(StrEnum):
    """The result of comparing a policy with an earlier policy."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"  # the difference is within the margin in both directions
    NOT_ENOUGH = "not enough data"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCase:
    """The paired scores of one case."""

    case: str
    before: tuple[float, ...]  # scores of the attempts that are scored on both sides
    after: tuple[float, ...]

    @property
    def difference(self) -> Fraction:
        """The mean of `after` minus the mean of `before`, as an exact fraction; 0 if the means are equal up to rounding."""
        difference = (sum(map(exact_fraction, self.after), Fraction()) - sum(map(exact_fraction, self.before), Fraction())) / len(
            self.before
        )
        return difference if abs(difference) > tolerance(*self.before, *self.after) else Fraction()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedScores:
    """The paired scores of two evaluations, and the cases and attempts that could not be paired."""

    pairs: tuple[PairedCase, ...]
    unpaired: tuple[str, ...]  # cases without a pair of scored attempts
    unscored: int  # pairs of attempts that one side did not score


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of two policies on the same cases. `effect` is the mean over cases of `PairedCase.difference`."""

    cases: int
    attempts: int  # pairs of attempts
    unscored: int  # pairs of attempts that one side did not score
    unpaired: tuple[str, ...]  # cases without a pair of scored attempts
    before: float
    after: float
    effect: float
    low: float  # lower end of the 95% interval
    high: float
    p_value: float  # two-sided, from a sign-flip test on the case differences
    exact: bool
    evidence_of_drop: float  # see `agentrl.evaluation.statistics.e_value`; 0 if a difference is outside [-1, 1]
    lost: tuple[str, ...]  # cases with a lower mean after, the largest loss first
    gained: tuple[str, ...]
    spread: float  # standard deviation of the case differences
    alpha: float
    margin: float
    verdict: ComparisonVerdict

    def cases_needed(self, difference: float, *, chance: float = 0.8) -> int:
        """Returns the number of cases, similar to the compared ones, that are needed to detect `difference` with probability `chance`.

        The computation assumes the observed standard deviation of the case differences or, if it is larger, the standard deviation that
        `difference` itself causes. Raises `ValueError` if `difference` is 0 or outside [-1, 1].
        """
        spread = max(self.spread, planned_spread(difference, 0.0))
        return cases_needed(difference, spread, alpha=self.alpha, power=chance)


def pair_scores(before: Scores, after: Scores) -> PairedScores:
    """Pairs the scores of attempt k at a case in `before` and in `after`, if both scores are finite numbers."""
    pairs: list[PairedCase] = []
    unscored = 0
    for case in sorted(before.keys() & after.keys()):
        both = list(zip(before[case], after[case], strict=False))
        scored = [(one, other) for one, other in both if _is_number(one) and _is_number(other)]
        unscored += len(both) - len(scored)
        if scored:
            ones, others = zip(*scored, strict=True)
            pairs.append(PairedCase(case=case, before=ones, after=others))
    unpaired = (before.keys() | after.keys()) - {pair.case for pair in pairs}
    return PairedScores(pairs=tuple(pairs), unpaired=tuple(sorted(unpaired)), unscored=unscored)


def compare(before: Scores, after: Scores, *, alpha: float = ALPHA, margin: float = MARGIN, seed: int = 0) -> Comparison | None:
    """Compares the scores `after` with the scores `before`. Returns None if no pair of attempts is scored on both sides.

    The verdict is `same` if the interval of the effect at level 1 - 2 alpha is within -margin and +margin, as in two one-sided tests
    (Schuirmann 1987). Otherwise it is `better` or `worse` if the sign-flip test is significant at `alpha`, and `not enough data` if it is
    not significant. Raises `UserError` if scipy is not installed.
    """
    both = pair_scores(before, after)
    pairs = both.pairs
    if not pairs:
        return None
    differences = [pair.difference for pair in pairs]
    changes = [float(difference) for difference in differences]
    wide = difference_interval(changes, seed=seed)
    narrow = difference_interval(changes, level=1 - 2 * alpha, made_up=_SAMENESS_SQUARES, seed=seed)
    tails = sign_flip_test(differences, seed=seed)
    verdict = ComparisonVerdict.NOT_ENOUGH
    if -margin < narrow.low and narrow.high < margin:
        verdict = ComparisonVerdict.SAME
    elif tails.both <= alpha:
        verdict = ComparisonVerdict.WORSE if wide.value < 0 else ComparisonVerdict.BETTER
    ranked = sorted(zip(differences, pairs, strict=True), key=lambda item: (item[0], item[1].case))
    return Comparison(
        cases=len(pairs),
        attempts=sum(len(pair.before) for pair in pairs),
        unscored=both.unscored,
        unpaired=both.unpaired,
        before=statistics.fmean(statistics.fmean(pair.before) for pair in pairs),
        after=statistics.fmean(statistics.fmean(pair.after) for pair in pairs),
        effect=wide.value,
        low=wide.low,
        high=wide.high,
        p_value=tails.both,
        exact=tails.exact,
        evidence_of_drop=e_value(changes) if all(-1 <= change <= 1 for change in changes) else 0.0,
        lost=tuple(pair.case for difference, pair in ranked if difference < 0),
        gained=tuple(pair.case for difference, pair in reversed(ranked) if difference > 0),
        spread=statistics.stdev(changes) if len(changes) > 1 else 0.0,
        alpha=alpha,
        margin=margin,
        verdict=verdict,
    )


def _is_number(score: float | None) -> bool:
    return score is not None and math.isfinite(score)

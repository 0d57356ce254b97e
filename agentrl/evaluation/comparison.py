"""The paired comparison of two policies: which attempts are pairs, what they say, and what may be concluded."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from agentrl.base.scores import exact_fraction, tolerance
from agentrl.evaluation import intervals, power
from agentrl.evaluation.exact import sign_flip_test
from agentrl.evaluation.sequential import e_value

Scores = Mapping[str, Sequence[float | None]]
"""Case -> the score of each attempt, in their order; None: unscored."""

ALPHA, MARGIN = 0.05, 0.05
_FOR_SAMENESS = 3.5  # see `intervals.differences`: what has not been seen in a few cases is no proof that it is rare


class ComparisonVerdict(StrEnum):
    """What may be said of the second policy against the first."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"  # the difference, whichever way, is within the margin
    NOT_ENOUGH = "not enough data"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCase:
    """One case, tried by both."""

    case: str
    before: tuple[float, ...]  # scores of the attempts that both have one of
    after: tuple[float, ...]

    @property
    def difference(self) -> Fraction:
        """The mean over the attempts of after minus before; exact, and 0 if both are equal up to rounding."""
        moved = (sum(map(exact_fraction, self.after), Fraction()) - sum(map(exact_fraction, self.before), Fraction())) / len(self.before)
        return moved if abs(moved) > tolerance(*self.before, *self.after) else Fraction()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedScores:
    """What of two evaluations can be compared."""

    pairs: tuple[PairedCase, ...]
    unpaired: tuple[str, ...]  # cases that only one side has, or of which no attempt is a pair
    unscored: int  # attempts that one of the two has no score of


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two policies on the same cases: `effect` is the mean score after minus the mean score before, over cases."""

    cases: int
    attempts: int  # pairs of them
    unscored: int  # attempts left out, because one side has no score
    unpaired: tuple[str, ...]  # cases that only one side has, or of which no attempt is a pair
    before: float
    after: float
    effect: float
    low: float  # of the 95% interval
    high: float
    p_value: float  # two-sided, by flipping the signs of whole cases
    exact: bool
    evidence_of_drop: float  # anytime-valid: `agentrl.evaluation.sequential.e_value`; 0 where scores leave [0, 1]
    lost: tuple[str, ...]  # cases with a lower mean after, the largest loss first
    gained: tuple[str, ...]
    spread: float  # standard deviation of the case differences
    alpha: float
    margin: float
    verdict: ComparisonVerdict

    def cases_needed(self, difference: float, *, chance: float = 0.8) -> int:
        """Cases like these that a difference would need to be seen with this chance. Raises `ValueError` for a difference of 0.

        Where fewer flipped than such a difference must flip, what was seen says nothing of it: it is planned without noise.
        """
        spread = max(self.spread, power.planned_spread(difference, 0.0))
        return power.cases_needed(difference, spread, alpha=self.alpha, power=chance)


def pair_scores(before: Scores, after: Scores) -> PairedScores:
    """Attempt k of a case is one side's pair to the other's; what only one has is left out."""
    pairs: list[PairedCase] = []
    unscored = 0
    for case in sorted(before.keys() & after.keys()):
        both = list(zip(before[case], after[case], strict=False))
        scored = [(one, other) for one, other in both if _number(one) and _number(other)]
        unscored += len(both) - len(scored)
        if scored:
            ones, others = zip(*scored, strict=True)
            pairs.append(PairedCase(case=case, before=ones, after=others))
    there = {pair.case for pair in pairs}
    return PairedScores(pairs=tuple(pairs), unpaired=tuple(sorted((before.keys() | after.keys()) - there)), unscored=unscored)


def compare(before: Scores, after: Scores, *, alpha: float = ALPHA, margin: float = MARGIN, seed: int = 0) -> Comparison | None:
    """Compares `after` with `before`; None where there is not one pair.

    `same` where the interval of level 1 - 2 alpha lies within the margin: two one-sided tests (Schuirmann 1987). Else `better` or
    `worse` where the sign-flip test is significant at `alpha`, else `not enough data`.
    """
    both = pair_scores(before, after)
    pairs = both.pairs
    if not pairs:
        return None
    differences = [pair.difference for pair in pairs]
    moved = [float(one) for one in differences]
    wide = intervals.difference_interval(moved, seed=seed)
    narrow = intervals.difference_interval(moved, level=1 - 2 * alpha, made_up=_FOR_SAMENESS, seed=seed)
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
        evidence_of_drop=e_value(moved) if all(-1 <= one <= 1 for one in moved) else 0.0,
        lost=tuple(pair.case for difference, pair in ranked if difference < 0),
        gained=tuple(pair.case for difference, pair in reversed(ranked) if difference > 0),
        spread=statistics.stdev(moved) if len(moved) > 1 else 0.0,
        alpha=alpha,
        margin=margin,
        verdict=verdict,
    )


def _number(score: float | None) -> bool:
    return score is not None and math.isfinite(score)

"""Computes the agreement between two raters, with 95% intervals that are valid even if there are few answers or agreement is perfect."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from agentrl.base.numbers import student_t_quantile, wilson_interval
from agentrl.errors import UserError
from agentrl.judge.calibration import Calibration, IntervalEstimate

_Z = NormalDist().inv_cdf(0.975)
_DRAWS = 4000  # draws from a posterior; the error of its quantiles is about 1% of the interval's width
_TAIL = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementTable:
    """Contingency table of two ratings of the same answers. A human label is always the first of the two ratings."""

    right_right: int
    right_wrong: int
    wrong_right: int
    wrong_wrong: int

    @classmethod
    def from_pairs(cls, pairs: Sequence[tuple[bool, bool]]) -> AgreementTable:
        """Counts pairs of ratings; True means "right"."""
        counts = Counter(pairs)
        return cls(
            right_right=counts[True, True],
            right_wrong=counts[True, False],
            wrong_right=counts[False, True],
            wrong_wrong=counts[False, False],
        )

    @property
    def n(self) -> int:
        """Number of answers."""
        return self.right_right + self.right_wrong + self.wrong_right + self.wrong_wrong

    @property
    def rights(self) -> int:
        """Number of answers whose first rating is "right"."""
        return self.right_right + self.right_wrong

    @property
    def wrongs(self) -> int:
        """Number of answers whose first rating is "wrong"."""
        return self.wrong_right + self.wrong_wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignEffects:
    """Design effects (Kish 1965): the number of answers per effective answer.

    Each effect is at least 1, because answers to the same task are correlated.
    """

    agreement: float = 1.0
    sensitivity: float = 1.0
    specificity: float = 1.0
    informedness: float = 1.0

    @classmethod
    def from_pairs(cls, tasks: Sequence[str], pairs: Sequence[tuple[bool, bool]]) -> DesignEffects:
        """Returns the design effects for pairs of ratings (see `AgreementTable.from_pairs`). `tasks` contains the task id of each pair."""
        rated = [(task, first, float(first == second)) for task, (first, second) in zip(tasks, pairs, strict=True)]
        groups = [[(task, same) for task, first, same in rated if first is label] for label in (True, False)]
        rates = [statistics.fmean(same for _, same in group) if group else 0.0 for group in groups]
        # The first-order contribution of each answer to sensitivity + specificity.
        parts = [(task, (same - rate) / len(group)) for group, rate in zip(groups, rates, strict=True) for task, same in group]
        alone = sum(rate * (1 - rate) / len(group) for group, rate in zip(groups, rates, strict=True) if group)
        sensitivity, specificity = (design_effect(group) for group in groups)
        return cls(
            agreement=design_effect([(task, same) for task, _, same in rated]),
            sensitivity=sensitivity,
            specificity=specificity,
            informedness=_effect(parts, alone),
        )


def design_effect(of: Sequence[tuple[str, float]]) -> float:
    """Returns the design effect of a share of answers.

    `of` contains one pair per answer: its task id, and 1 if the share includes it, else 0.
    """
    rate = statistics.fmean(value for _, value in of) if of else 0.0
    return _effect([(task, value - rate) for task, value in of], rate * (1 - rate) * len(of))


def _effect(parts: Sequence[tuple[str, float]], alone: float) -> float:
    """Returns the variance of a sum of terms with mean 0, divided by `alone`, the variance if all terms were independent.

    The variance between tasks is the variance of the linearised sum (Kish 1965). Because an estimate from few tasks is uncertain, the
    effect is multiplied by (t / z)^2 (Korn and Graubard 1998). If all answers have the same value, the effect cannot be observed, and all
    answers to the same task count as one answer.
    """
    sums: dict[str, float] = {}
    for task, part in parts:
        sums[task] = sums.get(task, 0.0) + part
    tasks, answers = len(sums), len(parts)
    if tasks == answers:
        return 1.0
    if tasks == 1 or alone <= 0:
        return answers / tasks
    between = tasks / (tasks - 1) * math.fsum(total * total for total in sums.values())
    return min(max(1.0, between / alone) * (student_t_quantile(tasks - 1) / _Z) ** 2, float(answers))


def share(part: int, of: int, *, effect: float = 1.0) -> IntervalEstimate:
    """Returns the share `part / of` with Wilson's interval for `of / effect` answers (`effect`: design effect), where `of` > 0."""
    low, high = wilson_interval(part / of, of / effect)
    return IntervalEstimate(value=part / of, low=low, high=high, n=of)


def agreement(table: AgreementTable, *, effect: float = 1.0) -> IntervalEstimate:
    """Returns the share of answers to which both raters give the same rating."""
    return share(table.right_right + table.wrong_wrong, table.n, effect=effect)


def kappa(table: AgreementTable, *, effect: float = 1.0) -> IntervalEstimate:
    """Returns Cohen's kappa (Cohen 1960): agreement beyond chance, at most 1; 0 is chance.

    The interval is the central 95% of the posterior, from 4,000 seeded draws of the four shares from a Dirichlet distribution with
    Jeffreys' prior of 1/2. Unlike the delta-method interval, the interval does not shrink to width 0 for perfect agreement. The counts in
    the table are divided by `effect`, the design effect of agreement.

    Raises `ValueError` if both raters rate all answers as right, or both rate all answers as wrong.
    """
    cells = (table.right_right, table.right_wrong, table.wrong_right, table.wrong_wrong)
    value = _kappa(cells)
    if value is None:
        raise ValueError("both raters give every answer the same rating")
    rng = random.Random(0)
    samples = []
    for _ in range(_DRAWS):
        sample = _kappa([rng.gammavariate(cell / effect + 0.5, 1.0) for cell in cells])
        if sample is not None:
            samples.append(sample)
    samples.sort()
    low, high = samples[int(_TAIL * len(samples))], samples[int((1 - _TAIL) * len(samples))]
    return IntervalEstimate(value=value, low=min(low, value), high=max(high, value), n=table.n)


def informedness(table: AgreementTable, *, effect: float = 1.0) -> IntervalEstimate:
    """Returns sensitivity + specificity - 1 (Youden 1950). The value is 0 for a judge that ignores the answer.

    The interval combines the intervals of sensitivity and specificity (Newcombe 1998, hybrid score method).
    """
    sensitivity = share(table.right_right, table.rights, effect=effect)
    specificity = share(table.wrong_wrong, table.wrongs, effect=effect)
    value = sensitivity.value + specificity.value - 1
    below = math.hypot(sensitivity.value - sensitivity.low, specificity.value - specificity.low)
    above = math.hypot(sensitivity.high - sensitivity.value, specificity.high - specificity.value)
    return IntervalEstimate(value=value, low=max(-1.0, value - below), high=min(1.0, value + above), n=table.n)


def corrected_rate(passed: int, total: int, calibration: Calibration) -> IntervalEstimate:
    """Estimates the true success rate from the rate that a judge measured (Rogan and Gladen 1978): (rate + specificity - 1) / informedness.

    The interval is that of Lang and Reiczigel (2014, Preventive Veterinary Medicine 113), the delta method on adjusted counts. The interval
    includes the uncertainty of the rate, the sensitivity and the specificity. It is valid only if the judge's error rates on these answers
    equal its error rates on the labelled answers. Labelled answers from another task family or from a much weaker policy are therefore of
    little use.

    Args:
        passed: number of answers that the judge rated as right, out of `total` answers with a verdict.

    Raises:
        UserError: `passed` is not from 0 to `total`, `total` is 0, or the judge may be no better than chance.
    """
    if not 0 <= passed <= total or total == 0:
        raise UserError(f"{passed} of {total} is not a rate", fix="pass the number of passed answers and the number of judged answers")
    if calibration.may_be_chance:
        raise UserError(
            f"judge {calibration.judge} may be no better than chance, so its rates cannot be corrected", fix="use a different judge"
        )
    se, sp, rights, wrongs = _added(calibration)
    rate = (passed + _Z**2 / 2) / (total + _Z**2)
    informed = se + sp - 1
    estimate = (rate + sp - 1) / informed
    errors = (estimate**2 * se * (1 - se) / rights, (1 - estimate) ** 2 * sp * (1 - sp) / wrongs)
    half = _Z * math.sqrt(rate * (1 - rate) / (total + _Z**2) + sum(errors)) / informed
    shift = 2 * _Z**2 * (estimate * se * (1 - se) / rights - (1 - estimate) * sp * (1 - sp) / wrongs)
    plain = passed / total + calibration.specificity.value - 1
    value = _clip(plain / calibration.informedness.value)
    return IntervalEstimate(
        value=value, low=min(_clip(estimate + shift - half), value), high=max(_clip(estimate + shift + half), value), n=total
    )


def partial_correlation(xs: Sequence[float], ys: Sequence[float], groups: Sequence[bool]) -> IntervalEstimate | None:
    """Returns Pearson's correlation of `xs` and `ys` within the groups, with Fisher's interval.

    Returns None if there are fewer than 10 points, or if the values do not vary within the groups.
    """
    centred: list[tuple[float, float]] = []
    for group in (True, False):
        inside = [(x, y) for x, y, label in zip(xs, ys, groups, strict=True) if label is group]
        if inside:
            mean_x, mean_y = statistics.fmean(x for x, _ in inside), statistics.fmean(y for _, y in inside)
            centred += [(x - mean_x, y - mean_y) for x, y in inside]
    spread = math.sqrt(math.fsum(x * x for x, _ in centred) * math.fsum(y * y for _, y in centred))
    if len(centred) < 10 or spread < 1e-12:
        return None
    value = max(-0.999999, min(0.999999, math.fsum(x * y for x, y in centred) / spread))
    half = _Z / math.sqrt(len(centred) - 4)  # not n - 3 as for a plain correlation, because there are two group means
    return IntervalEstimate(value=value, low=math.tanh(math.atanh(value) - half), high=math.tanh(math.atanh(value) + half), n=len(centred))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Answers with similar scores: their mean score, and the share of correct answers."""

    score: float
    right: IntervalEstimate


def reliability(scores: Sequence[float], labels: Sequence[bool], *, most: int = 10) -> tuple[Bin, ...]:
    """Returns the reliability curve: one bin per distinct score, or `most` bins of equal width if there are more distinct scores."""
    different = sorted(set(scores))
    low, high = different[0], different[-1]

    def place(score: float) -> int:
        return different.index(score) if len(different) <= most else min(int((score - low) / (high - low) * most), most - 1)

    bins: dict[int, list[tuple[float, bool]]] = {}
    for score, label in zip(scores, labels, strict=True):
        bins.setdefault(place(score), []).append((score, label))
    return tuple(
        Bin(score=statistics.fmean(score for score, _ in members), right=share(sum(label for _, label in members), len(members)))
        for _, members in sorted(bins.items())
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    """Returns the expected calibration error (Naeini et al. 2015) of scores from 0 to 1.

    This is the mean distance between a bin's score and its share of correct answers, weighted by the bin's number of answers.
    """
    return sum(bucket.right.n * abs(bucket.score - bucket.right.value) for bucket in bins) / sum(bucket.right.n for bucket in bins)


def _kappa(cells: Sequence[float]) -> float | None:
    total = math.fsum(cells)
    both, first, second, neither = (cell / total for cell in cells)
    says, other = both + first, both + second
    chance = says * other + (1 - says) * (1 - other)
    return None if chance >= 1 else (both + neither - chance) / (1 - chance)


def _added(calibration: Calibration) -> tuple[float, float, float, float]:
    """Returns sensitivity and specificity with a success and failure added to each, and the adjusted counts of right and wrong answers."""
    worth = 1 / calibration.design_effect
    rights = (calibration.right_right + calibration.right_wrong) * worth + 2
    wrongs = (calibration.wrong_right + calibration.wrong_wrong) * worth + 2
    return (calibration.right_right * worth + 1) / rights, (calibration.wrong_wrong * worth + 1) / wrongs, rights, wrongs


def _clip(value: float) -> float:
    return max(0.0, min(1.0, value))

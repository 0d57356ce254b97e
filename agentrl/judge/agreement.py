"""How far two opinions agree, with 95% intervals that stay honest for few answers and for perfect agreement."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from agentrl.base.estimates import student_t_quantile, wilson_interval
from agentrl.errors import UserError
from agentrl.judge.calibration import Calibration, IntervalEstimate

_Z = NormalDist().inv_cdf(0.975)
_DRAWS = 4000  # of a posterior; its quantiles are then known to about a hundredth of the interval's width
_TAIL = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementTable:
    """Two opinions on the same answers. The first one is the label, where one of them is."""

    right_right: int
    right_wrong: int
    wrong_right: int
    wrong_wrong: int

    @classmethod
    def from_pairs(cls, pairs: Sequence[tuple[bool, bool]]) -> AgreementTable:
        counts = Counter(pairs)
        return cls(
            right_right=counts[True, True],
            right_wrong=counts[True, False],
            wrong_right=counts[False, True],
            wrong_wrong=counts[False, False],
        )

    @property
    def n(self) -> int:
        return self.right_right + self.right_wrong + self.wrong_right + self.wrong_wrong

    @property
    def rights(self) -> int:
        return self.right_right + self.right_wrong

    @property
    def wrongs(self) -> int:
        return self.wrong_right + self.wrong_wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignEffects:
    """How many answers are worth one independent one, because answers to one task are alike: design effects, 1 or more (Kish 1965)."""

    agreement: float = 1.0
    sensitivity: float = 1.0
    specificity: float = 1.0
    informedness: float = 1.0

    @classmethod
    def from_pairs(cls, tasks: Sequence[str], pairs: Sequence[tuple[bool, bool]]) -> DesignEffects:
        """Of opinions as in `AgreementTable.of`, each on an answer to a task."""
        every = [(task, first, float(first == second)) for task, (first, second) in zip(tasks, pairs, strict=True)]
        groups = [[(task, same) for task, first, same in every if first is label] for label in (True, False)]
        rates = [statistics.fmean(same for _, same in group) if group else 0.0 for group in groups]
        # Each answer's part in sensitivity + specificity, to the first order.
        parts = [(task, (same - rate) / len(group)) for group, rate in zip(groups, rates, strict=True) for task, same in group]
        alone = sum(rate * (1 - rate) / len(group) for group, rate in zip(groups, rates, strict=True) if group)
        sensitivity, specificity = (design_effect(group) for group in groups)
        return cls(
            agreement=design_effect([(task, same) for task, _, same in every]),
            sensitivity=sensitivity,
            specificity=specificity,
            informedness=_effect(parts, alone),
        )


def design_effect(of: Sequence[tuple[str, float]]) -> float:
    """The design effect of a share: (task, 1 or 0) of each answer."""
    rate = statistics.fmean(value for _, value in of) if of else 0.0
    return _effect([(task, value - rate) for task, value in of], rate * (1 - rate) * len(of))


def _effect(parts: Sequence[tuple[str, float]], alone: float) -> float:
    """The variance of a sum of parts whose mean is 0, over `alone`, what it would be if all were independent.

    The variance between tasks is that of the linearized sum (Kish 1965). It is known as well as the number of tasks allows, so that the
    effect grows by (t / z)^2 (Korn and Graubard 1998). Where no two answers differ nothing is seen of it, and those to one task count once;
    of a single task nothing is known of others.
    """
    sums: dict[str, float] = {}
    for task, part in parts:
        sums[task] = sums.get(task, 0.0) + part
    tasks, answers = len(sums), len(parts)
    if tasks == answers:
        return 1.0
    if tasks == 1 or alone <= 0:
        return answers / tasks
    between = tasks / (tasks - 1) * math.fsum(one * one for one in sums.values())
    return min(max(1.0, between / alone) * (student_t_quantile(tasks - 1) / _Z) ** 2, float(answers))


def share(part: int, of: int, *, effect: float = 1.0) -> IntervalEstimate:
    """A share with Wilson's interval. `effect`: how many of them are worth one (`DesignEffects`)."""
    low, high = wilson_interval(part / of, of / effect)
    return IntervalEstimate(value=part / of, low=low, high=high, n=of)


def agreement(table: AgreementTable, *, effect: float = 1.0) -> IntervalEstimate:
    return share(table.right_right + table.wrong_wrong, table.n, effect=effect)


def kappa(table: AgreementTable, *, effect: float = 1.0) -> IntervalEstimate:
    """Cohen's kappa (Cohen 1960): agreement beyond that of chance, 1 at most, 0 for chance.

    The interval is the central 95% of its posterior, by 4,000 seeded draws of the four shares from a Dirichlet distribution with
    Jeffreys' prior of 1/2; unlike the usual one of the delta method it has a width where agreement is perfect. Counts are divided by
    `effect`, that of agreement.

    Raises `ValueError` where both say the same of everything: there is no chance to compare with.
    """
    cells = (table.right_right, table.right_wrong, table.wrong_right, table.wrong_wrong)
    value = _kappa(cells)
    if value is None:
        raise ValueError("both give one verdict on everything")
    draw = random.Random(0)
    drawn = []
    for _ in range(_DRAWS):
        found = _kappa([draw.gammavariate(cell / effect + 0.5, 1.0) for cell in cells])
        if found is not None:
            drawn.append(found)
    drawn.sort()
    low, high = drawn[int(_TAIL * len(drawn))], drawn[int((1 - _TAIL) * len(drawn))]
    return IntervalEstimate(value=value, low=min(low, value), high=max(high, value), n=table.n)


def informedness(table: AgreementTable, *, effect: float = 1.0) -> IntervalEstimate:
    """Sensitivity + specificity - 1 (Youden 1950): 0 for any judge that does not look at the answer.

    The interval puts those of the two shares together (Newcombe 1998, the hybrid score method).
    """
    sensitivity = share(table.right_right, table.rights, effect=effect)
    specificity = share(table.wrong_wrong, table.wrongs, effect=effect)
    value = sensitivity.value + specificity.value - 1
    below = math.hypot(sensitivity.value - sensitivity.low, specificity.value - specificity.low)
    above = math.hypot(sensitivity.high - sensitivity.value, specificity.high - specificity.value)
    return IntervalEstimate(value=value, low=max(-1.0, value - below), high=min(1.0, value + above), n=table.n)


def corrected_rate(passed: int, total: int, calibration: Calibration) -> IntervalEstimate:
    """The true success rate behind one that a judge gives (Rogan and Gladen 1978): (rate + specificity - 1) / informedness.

    The interval is that of Lang and Reiczigel (2014, Preventive Veterinary Medicine 113): the delta method on counts to which a few
    are added; it knows how uncertain rate, sensitivity and specificity are. It holds where the judge errs on these answers as it does
    on the labelled ones: labels of another family or of a much weaker policy say little.

    Args:
        passed: answers that the judge calls right, of `total` that it gave a verdict on.

    Raises:
        UserError: the judge is not shown to be better than chance, so that nothing can be inferred.
    """
    if not 0 <= passed <= total or total == 0:
        raise UserError(f"{passed} of {total} is no rate", fix="give how many passed, and how many were judged")
    if calibration.may_be_chance:
        raise UserError(f"judge {calibration.judge} is not shown to be better than chance: its rates say nothing", fix="use another judge")
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
    """Pearson's correlation within the groups, with Fisher's interval; None for fewer than 10 points, or without any spread."""
    centred: list[tuple[float, float]] = []
    for group in (True, False):
        inside = [(x, y) for x, y, one in zip(xs, ys, groups, strict=True) if one is group]
        if inside:
            mean_x, mean_y = statistics.fmean(x for x, _ in inside), statistics.fmean(y for _, y in inside)
            centred += [(x - mean_x, y - mean_y) for x, y in inside]
    spread = math.sqrt(math.fsum(x * x for x, _ in centred) * math.fsum(y * y for _, y in centred))
    if len(centred) < 10 or spread < 1e-12:
        return None
    value = max(-0.999999, min(0.999999, math.fsum(x * y for x, y in centred) / spread))
    half = _Z / math.sqrt(len(centred) - 4)  # one more than for a plain correlation: the groups' means were fitted
    return IntervalEstimate(value=value, low=math.tanh(math.atanh(value) - half), high=math.tanh(math.atanh(value) + half), n=len(centred))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Answers whose scores lie together: what they were on average, and how many of them are right."""

    score: float
    right: IntervalEstimate


def reliability(scores: Sequence[float], labels: Sequence[bool], *, most: int = 10) -> tuple[Bin, ...]:
    """The reliability curve: a bin for each score where there are at most `most` different ones, else bins of equal width."""
    different = sorted(set(scores))
    low, high = different[0], different[-1]

    def place(score: float) -> int:
        return different.index(score) if len(different) <= most else min(int((score - low) / (high - low) * most), most - 1)

    bins: dict[int, list[tuple[float, bool]]] = {}
    for score, label in zip(scores, labels, strict=True):
        bins.setdefault(place(score), []).append((score, label))
    return tuple(
        Bin(score=statistics.fmean(score for score, _ in one), right=share(sum(label for _, label in one), len(one)))
        for _, one in sorted(bins.items())
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance between score and share of right answers over all answers (Naeini et al. 2015), for scores from 0 to 1."""
    return sum(one.right.n * abs(one.score - one.right.value) for one in bins) / sum(one.right.n for one in bins)


def _kappa(cells: Sequence[float]) -> float | None:
    total = math.fsum(cells)
    both, first, second, neither = (cell / total for cell in cells)
    says, other = both + first, both + second
    chance = says * other + (1 - says) * (1 - other)
    return None if chance >= 1 else (both + neither - chance) / (1 - chance)


def _added(calibration: Calibration) -> tuple[float, float, float, float]:
    """Sensitivity and specificity with one success and one failure added, and of how many they are then."""
    worth = 1 / calibration.design_effect
    rights = (calibration.right_right + calibration.right_wrong) * worth + 2
    wrongs = (calibration.wrong_right + calibration.wrong_wrong) * worth + 2
    return (calibration.right_right * worth + 1) / rights, (calibration.wrong_wrong * worth + 1) / wrongs, rights, wrongs


def _clip(value: float) -> float:
    return max(0.0, min(1.0, value))

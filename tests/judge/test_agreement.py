"""Statistics of agreement: closed forms, and the coverage of intervals by seeded simulation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agentrl.errors import UserError
from agentrl.judge import agreement as stats
from agentrl.judge.agreement import AgreementTable, corrected_rate, informedness, kappa, partial_correlation, reliability
from agentrl.judge.calibrate import LabelledVerdict, _calibration
from agentrl.judge.calibration import Calibration, IntervalEstimate


def simulated_table(n: int, *, rate: float, se: float, sp: float, seed: int) -> AgreementTable:
    """A judge with this sensitivity and specificity on n answers, of which the fraction `rate` is right."""
    draw = random.Random(seed)
    labels = [draw.random() < rate for _ in range(n)]
    return AgreementTable.from_pairs([(label, draw.random() < (se if label else 1 - sp)) for label in labels])


def tables(sims: int, n: int, **options: float) -> Iterator[AgreementTable]:
    for seed in range(sims):
        table = simulated_table(n, seed=seed, **options)  # type: ignore[arg-type]
        if table.rights and table.wrongs:
            yield table


def calibration(table: AgreementTable) -> Calibration:
    cells = (
        (True, 1.0, table.right_right),
        (True, 0.0, table.right_wrong),
        (False, 1.0, table.wrong_right),
        (False, 0.0, table.wrong_wrong),
    )
    pairs = [(label, score) for label, score, count in cells for _ in range(count)]
    verdicts = [LabelledVerdict(label=label, score=score, task_id=f"t{number}") for number, (label, score) in enumerate(pairs)]
    return _calibration(None, verdicts, reference="r", labels_sha256="", threshold=0.5)


def covers(interval: IntervalEstimate, truth: float) -> bool:
    return interval.low <= truth <= interval.high


@pytest.mark.slow
def test_kappa_and_its_interval_are_correct_for_perfect_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    table = AgreementTable(right_right=20, right_wrong=5, wrong_right=10, wrong_wrong=15)  # Cohen's own example: 0.4
    estimate = kappa(table)
    assert estimate.value == pytest.approx(0.4) and kappa(table) == estimate, "the drawn interval is the same in each run"
    perfect = kappa(AgreementTable(right_right=20, right_wrong=0, wrong_right=0, wrong_wrong=20))
    assert perfect.value == perfect.high == 1.0 and 0.7 < perfect.low < 0.95
    with pytest.raises(ValueError):
        kappa(AgreementTable(right_right=9, right_wrong=0, wrong_right=0, wrong_wrong=0))
    monkeypatch.setattr(stats, "_DRAWS", 400)
    for rate, se, sp in ((0.5, 0.9, 0.9), (0.8, 0.95, 0.6), (0.5, 0.5, 0.5)):
        yes = rate * se + (1 - rate) * (1 - sp)
        chance = rate * yes + (1 - rate) * (1 - yes)
        truth = (rate * se + (1 - rate) * sp - chance) / (1 - chance)
        covered = [covers(kappa(table), truth) for table in tables(150, 80, rate=rate, se=se, sp=sp)]
        assert sum(covered) / len(covered) > 0.9, (rate, se, sp)


@pytest.mark.parametrize(("rate", "se", "sp", "n"), [(0.5, 0.9, 0.9, 60), (0.8, 0.98, 0.7, 60), (0.5, 0.6, 0.4, 100), (0.3, 1.0, 0.95, 40)])
def test_interval_of_informedness_covers(rate: float, se: float, sp: float, n: int) -> None:
    covered = [covers(informedness(table), se + sp - 1) for table in tables(1500, n, rate=rate, se=se, sp=sp)]
    assert 0.93 < sum(covered) / len(covered) <= 1.0


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("truth", "se", "sp", "labels", "judged"),
    [
        (0.5, 0.9, 0.9, 200, 500),
        (0.8, 0.95, 0.7, 200, 500),
        (0.1, 0.9, 0.95, 150, 300),
        (0.95, 0.9, 0.8, 400, 1000),
        (0.0, 0.9, 0.9, 200, 200),
    ],
)
def test_interval_of_a_corrected_rate_covers(truth: float, se: float, sp: float, labels: int, judged: int) -> None:
    covered, estimates = [], []
    for seed, table in enumerate(tables(600, labels, rate=0.5, se=se, sp=sp)):
        passed = simulated_table(judged, rate=truth, se=se, sp=sp, seed=10_000 + seed)
        rate = corrected_rate(passed.right_right + passed.wrong_right, judged, _calibration_of(table))
        covered.append(covers(rate, truth))
        estimates.append(rate.value)
    assert 0.93 < sum(covered) / len(covered) <= 1.0
    assert sum(estimates) / len(estimates) == pytest.approx(truth, abs=0.03), "the uncorrected rate is rate * se + (1 - rate) * (1 - sp)"


def _calibration_of(table: AgreementTable) -> Calibration:
    """A calibration with these counts; the kappa, which is slow to compute, is a placeholder."""
    placeholder = IntervalEstimate(value=0.0, low=0.0, high=0.0, n=table.n)
    return replace(
        _EMPTY,
        right_right=table.right_right,
        right_wrong=table.right_wrong,
        wrong_right=table.wrong_right,
        wrong_wrong=table.wrong_wrong,
        agreement=placeholder,
        kappa=placeholder,
        sensitivity=stats.share(table.right_right, table.rights),
        specificity=stats.share(table.wrong_wrong, table.wrongs),
        informedness=informedness(table),
    )


_EMPTY = calibration(AgreementTable(right_right=2, right_wrong=1, wrong_right=1, wrong_wrong=2))


@pytest.mark.slow
def test_labels_of_one_task_are_correlated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge errs on all answers of a task alike, so an interval that assumes independence covers the truth far too seldom."""
    monkeypatch.setattr(stats, "_DRAWS", 40)
    covered: dict[str, list[bool]] = {name: [] for name in ("agreement", "informedness", "plain")}
    for seed in range(300):
        draw, verdicts = random.Random(seed), []
        for task in range(40):
            right = draw.random() < 0.85
            verdicts += [LabelledVerdict(label=n % 2 == 0, score=float((n % 2 == 0) == right), task_id=f"t{task}") for n in range(10)]
        calibrated = _calibration(None, verdicts, reference="r", labels_sha256="", threshold=0.5)
        covered["agreement"].append(covers(calibrated.agreement, 0.85))
        covered["informedness"].append(covers(calibrated.informedness, 0.7))
        covered["plain"].append(covers(stats.share(calibrated.right_right + calibrated.wrong_wrong, 400), 0.85))
    rates = {name: sum(flags) / len(flags) for name, flags in covered.items()}
    assert rates["agreement"] > 0.92 and rates["informedness"] > 0.92 and rates["plain"] < 0.6, rates

    pairs = [(True, True), (False, True)]
    independent = stats.DesignEffects.from_pairs([str(number) for number in range(40)], pairs * 20)
    assert independent == stats.DesignEffects(), "one label per task changes nothing"
    perfect = stats.DesignEffects.from_pairs([str(number // 8) for number in range(64)], [(True, True), (False, False)] * 32)
    assert perfect.agreement == perfect.informedness == 8.0, "without an error, each task counts once"
    single_task = stats.DesignEffects.from_pairs(["t"] * 64, [(True, True), (False, False), (True, False), (False, False)] * 16)
    assert (
        single_task.agreement == 64.0
        and informedness(AgreementTable.from_pairs([(True, True), (False, False)] * 32), effect=single_task.informedness).low < 0
    )


def test_rates_of_a_judge_at_chance_are_not_corrected() -> None:
    coin = calibration(AgreementTable(right_right=26, right_wrong=24, wrong_right=25, wrong_wrong=25))
    assert (
        coin.may_be_chance and not calibration(AgreementTable(right_right=40, right_wrong=10, wrong_right=10, wrong_wrong=40)).may_be_chance
    )
    with pytest.raises(UserError, match="better than chance"):
        corrected_rate(50, 100, coin)
    with pytest.raises(UserError, match="is not a rate"):
        corrected_rate(101, 100, _EMPTY)


def test_random_judge_is_rarely_accepted() -> None:
    accepted = [not informedness(table).low <= 0 for table in tables(2000, 50, rate=0.5, se=0.7, sp=0.3)]
    assert sum(accepted) / len(accepted) < 0.035


def test_length_bias_is_separated_from_correctness() -> None:
    draw = random.Random(3)
    labels = [draw.random() < 0.5 for _ in range(300)]
    lengths = [draw.gauss(6 if label else 4, 1) for label in labels]  # right answers are longer
    fair = [float(label) for label in labels]
    biased = [min(1.0, max(0.0, 0.2 * length - 0.5)) for length in lengths]
    assert partial_correlation(lengths, fair, labels) is None, "a judge that gives one score to all right answers has no such bias"
    noisy = partial_correlation(lengths, [score + draw.gauss(0, 0.1) for score in fair], labels)
    assert noisy is not None and covers(noisy, 0.0)
    estimate = partial_correlation(lengths, biased, labels)
    assert estimate is not None and estimate.low > 0.8
    covered = []
    for seed in range(400):
        chance = random.Random(seed)
        xs = [chance.gauss(0, 1) for _ in range(40)]
        interval = partial_correlation(xs, [0.5 * x + chance.gauss(0, 1) for x in xs], [chance.random() < 0.5 for _ in xs])
        covered.append(interval is not None and covers(interval, 0.5 / 1.25**0.5))
    assert 0.92 < sum(covered) / len(covered) <= 1.0


def test_reliability_curve_matches_the_scores() -> None:
    bins = reliability([0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [False, True, True, True, True, False])
    assert [(bin_.score, bin_.right.value, bin_.right.n) for bin_ in bins] == [(0.0, 0.5, 2), (1.0, 0.75, 4)]
    assert stats.calibration_error(bins) == pytest.approx((2 * 0.5 + 4 * 0.25) / 6)
    draw = random.Random(1)
    scores = [draw.random() for _ in range(4000)]
    calibrated = reliability(scores, [draw.random() < score for score in scores])
    assert len(calibrated) == 10 and stats.calibration_error(calibrated) < 0.03

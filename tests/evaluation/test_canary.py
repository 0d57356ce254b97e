"""A candidate version gets a share of the attempts, and their scores promote it or roll it back."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base.run_lock import drive_folder
from agentrl.cli import versions as cli
from agentrl.errors import UserError
from agentrl.evaluation.canary import CanaryOutcome, CanaryResult, check_canary, decide, plan_units, run_canary
from agentrl.evaluation.results import load_results
from agentrl.evaluation.statistics import Interval
from agentrl.records import VersionState
from agentrl.version import FolderRegistry, rollback
from tests.evaluation.test_versus import comparison_of, suite
from tests.gate import test_rolled_back as plain
from tests.session import test_version_changes as changes

scripted, run = plain.scripted, changes.run
PROMOTE, ROLL_BACK, UNDECIDED = CanaryOutcome


@given(st.integers(1, 40), st.integers(1, 4), st.integers(2, 6), st.integers(0, 99))
def test_each_attempt_runs_once_and_the_candidate_runs_one_of_each_unit(cases: int, repeats: int, size: int, seed: int) -> None:
    if cases * repeats < size:
        with pytest.raises(UserError, match=f"needs {size} attempts"):
            plan_units(suite(cases).cases, lambda case: repeats, share=1 / size, seed=seed)
        return
    units = plan_units(suite(cases).cases, lambda case: repeats, share=1 / size, seed=seed)
    slots = [slot for unit in units for slot in (unit.candidate, *unit.baseline)]
    assert len(slots) == len(set(slots)) == cases * repeats // size * size and all(len(unit.baseline) == size - 1 for unit in units)
    assert {number for _, number in slots} <= set(range(repeats))


def test_the_candidates_attempts_are_a_random_sample_of_the_cases() -> None:
    """Otherwise one version could get most of the hard cases."""
    chosen = Counter(
        unit.candidate[0] for seed in range(400) for unit in plan_units(suite(20).cases, lambda case: 1, share=0.25, seed=seed)
    )
    assert len(chosen) == 20 and all(70 <= times <= 130 for times in chosen.values()), chosen  # 100 expected, standard deviation 9


@pytest.mark.parametrize("share", [0.0, -0.5, 0.51, 0.4, 1.0, float("nan")])
def test_unsupported_shares_are_rejected(share: float) -> None:
    with pytest.raises(UserError, match="is not one of 1/2, 1/3"):
        plan_units(suite(20).cases, lambda case: 1, share=share, seed=0)


async def run_scripted(tmp_path: Path, weights: str, *, size: int = 64, margin: float = 0.25) -> tuple[CanaryResult, list[int], list[int]]:
    comparison, policy, pair = await comparison_of(tmp_path, weights, size=size, margin=margin)
    blocks: list[int] = []
    result = await run_canary(comparison, policy, (pair[0], pair[1]), share=0.25, on_block=lambda so_far: blocks.append(so_far.attempts[1]))
    await plain.close(policy.run)
    assert [len(load_results(folder).attempts) for folder in comparison.folders] == list(result.attempts)
    return result, blocks, [number for number, _ in plain.RecordingChannel.swapped]


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_worse_candidate_is_rolled_back_after_few_attempts(tmp_path: Path) -> None:
    result, blocks, _ = await run_scripted(tmp_path, "awful", size=256)
    assert (result.outcome, blocks, result.attempts, result.most) == (ROLL_BACK, [16], (48, 16), 64)
    assert (result.baseline, result.candidate, result.interval.value) == (1.0, 0.0, -1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_an_equal_candidate_is_promoted_and_a_quarter_of_the_attempts_were_its_own(tmp_path: Path) -> None:
    result, blocks, swaps = await run_scripted(tmp_path, "good still", size=256)
    assert result.outcome is PROMOTE and result.attempts == (3 * blocks[-1], blocks[-1]) and result.interval.low > -0.25
    assert swaps[:3] == [1, 2, 1], "a block that follows starts with the loaded weights"


@pytest.mark.usefixtures("scripted")
async def test_too_few_attempts_decide_nothing(tmp_path: Path) -> None:
    result, blocks, _ = await run_scripted(tmp_path, "good still", size=16)
    assert (result.outcome, blocks, result.attempts) == (UNDECIDED, [4], (12, 4))


def observations(rng: random.Random, baseline: float, candidate: float, count: int) -> list[float]:
    """Cases differ in difficulty, and are the same for both versions."""
    differences = []
    for _ in range(count):
        shifts = [rng.uniform(-0.2, 0.2) for _ in range(4)]
        others = [float(rng.random() < baseline + shift) for shift in shifts[1:]]
        differences.append(float(rng.random() < candidate + shifts[0]) - statistics.fmean(others))
    return differences


def first_decision(differences: Sequence[float]) -> CanaryOutcome:
    looks = (decide(differences[:n], planned=n, alpha=0.05, margin=0.1) for n in range(16, len(differences) + 1, 16))
    return next((outcome for outcome in looks if outcome is not UNDECIDED), UNDECIDED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "outcome", "least", "most"),
    [
        (0.0, ROLL_BACK, 0.0, 0.025),  # the stated error rates: alpha / 2 each, at the edge of each hypothesis
        (-0.1, PROMOTE, 0.0, 0.025),
        (0.0, PROMOTE, 0.8, 1.0),  # the power with 512 attempts of the candidate
        (0.1, PROMOTE, 0.99, 1.0),
        (-0.2, ROLL_BACK, 0.99, 1.0),
    ],
)
def test_inspecting_after_every_block_keeps_the_error_rates(change: float, outcome: CanaryOutcome, least: float, most: float) -> None:
    rng = random.Random(11)
    share = sum(first_decision(observations(rng, 0.7, 0.7 + change, 512)) is outcome for _ in range(300)) / 300
    assert least <= share <= most


def test_unscored_attempts_do_not_help_a_candidate() -> None:
    """Up to a fifth of the attempts may lack a score; with more there is no decision."""
    good = [0.5] * 100
    assert decide(good, planned=125, alpha=0.05, margin=0.1) is PROMOTE
    assert decide(good, planned=126, alpha=0.05, margin=0.1) is UNDECIDED


def result_of(outcome: CanaryOutcome) -> CanaryResult:
    interval = Interval(value=0.0, low=-0.1, high=0.1)
    return CanaryResult(outcome=outcome, interval=interval, baseline=0.5, candidate=0.5, attempts=(4, 1), unscored=0, most=9)


def test_the_decision_is_carried_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = FolderRegistry(run / "versions")
    check_canary(run, 2, 4)
    apply = partial(cli._apply_canary, run, 2, 4, quiet=False)
    assert not apply(result_of(UNDECIDED)) and "nothing was changed" in capsys.readouterr().out
    assert registry.latest(VersionState.SERVING) is not None and rollback.pending_request(run / "versions", registry) is None
    assert not apply(result_of(ROLL_BACK)) and (requested := rollback.pending_request(run / "versions", registry)) is not None
    assert (requested.to, (run / "model" / "model.safetensors").read_bytes()) == (2, weights(run, 2))
    assert "version 2 is promoted and exported" in (text := capsys.readouterr().out) and "undoing 3, 4" in text
    assert apply(result_of(PROMOTE)) and "version 4 is promoted" in capsys.readouterr().out
    assert (run / "model" / "model.safetensors").read_bytes() == weights(run, 4)


def test_the_result_is_printed_with_its_interval_and_both_shares() -> None:
    comparison = SimpleNamespace(alpha=0.05, margin=0.1, numbers=(2, 4), folders=(Path("ab/before"), Path("ab/after")))
    text = cli._canary_text(replace(result_of(PROMOTE), unscored=3), cast(Any, comparison))
    assert "candidate 0.500  version 4, 1 of at most 9 attempts" in text and "95% interval [-10.0, +10.0]" in text
    assert "decision  promote  (margin 10 points)" in text and "excluded  3 attempts" in text and text.endswith("ab/after")


def weights(run: Path, number: int) -> bytes:
    return (run / "versions" / f"{number:06d}" / "model.safetensors").read_bytes()


def test_a_decision_that_could_not_be_carried_out_is_an_error_before_the_first_attempt(run: Path) -> None:
    FolderRegistry(run / "versions").set_state(3, VersionState.ROLLED_BACK)
    for before, after, why in (
        (4, 2, "must be newer"),
        (3, 4, "neither may be rolled back"),
        (1, 4, "no intact checkpoint"),
        (2, 9, "no version 9"),
    ):
        with pytest.raises(UserError, match=why):
            check_canary(run, before, after)
    with drive_folder(run, command="train"), pytest.raises(UserError, match="running without a gate"):
        check_canary(run, 2, 4)

"""Two versions run the same cases until the difference is clear: real server supervision, episodes and scores; a scripted policy."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.evaluation import versus
from agentrl.evaluation.comparison import ComparisonVerdict
from agentrl.evaluation.engine import StoredEpisodes, SuiteAttempt
from agentrl.evaluation.open_policy import OpenPolicy
from agentrl.evaluation.results import CaseAttempt, load_results
from agentrl.evaluation.statistics import e_value
from agentrl.evaluation.versus import VersionComparison, difference_so_far, try_blocks
from agentrl.failure.case import Case, Suite
from agentrl.records import PolicyVersion
from tests.gate import gated_run as gated
from tests.gate import test_rolled_back as plain

scripted = plain.scripted


def suite(size: int) -> Suite:
    task = gated.make_suite().cases[0].task
    return Suite(folder=Path("x"), name="x", repeats=1, cases=tuple(Case(id=f"c{number:02d}", task=task) for number in range(size)))


async def comparison_of(tmp_path: Path, weights: str, *, size: int = 64, margin: float = 0.05) -> tuple[VersionComparison, OpenPolicy, Any]:
    """Version 1 passes every case. Version 2 has these weights."""
    run = await gated.open_run(tmp_path / "run")
    pair = [plain.publish(run.registry, number, 0, text.encode()) for number, text in ((1, "good"), (2, weights))]
    prepared = SimpleNamespace(
        suites=(suite(size),), recipe=run.recipe, repeats=None, threshold=1.0, start=SimpleNamespace(folder=tmp_path / "ab"),
        repeats_of=lambda suite, case: 1,
    )  # fmt: skip
    comparison = VersionComparison(run=Path("runs/x"), numbers=(4, 9), prepared=prepared, alpha=0.05, margin=margin)  # type: ignore[arg-type]
    policy = OpenPolicy(
        groups=run.groups, sandboxes=run.sandboxes, capture=run.capture, tracker=run.tracker, version=await run.base_version(),
        sampled_by=None, broken={}, stored=StoredEpisodes(run.store), run=run,
    )  # fmt: skip
    return comparison, policy, pair


async def compare_in_blocks(comparison: VersionComparison, policy: OpenPolicy, pair: list[PolicyVersion]) -> tuple[Any, list[int]]:
    after_blocks: list[int] = []
    result = await try_blocks(comparison, policy, (pair[0], pair[1]), on_block=lambda so_far: after_blocks.append(so_far.cases))
    await plain.close(policy.run)
    return result, after_blocks


@pytest.mark.usefixtures("scripted")
async def test_a_worse_version_is_stopped_after_the_first_block(tmp_path: Path) -> None:
    comparison, policy, pair = await comparison_of(tmp_path, "awful")
    result, blocks = await compare_in_blocks(comparison, policy, pair)
    assert (result.verdict, blocks, result.cases, result.most) == (ComparisonVerdict.WORSE, [16], 16, 64)
    assert (result.before, result.after, result.interval.value) == (1.0, 0.0, -1.0) and result.interval.high <= 0
    assert len(result.lost) == 16 and not result.gained
    before, after = (load_results(folder) for folder in comparison.folders)
    assert (before.about.version, after.about.version, after.about.sha256) == (4, 9, pair[1].sha256)
    assert before.task_keys == after.task_keys and len(before.attempts) == 16
    assert {attempt.versions for attempt in after.attempts} == {(2,)}


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_an_equal_version_runs_every_case_with_few_swaps(tmp_path: Path) -> None:
    comparison, policy, pair = await comparison_of(tmp_path, "good still", margin=0.01)
    result, blocks = await compare_in_blocks(comparison, policy, pair)
    assert (result.verdict, blocks) == (ComparisonVerdict.NOT_ENOUGH, [16, 32, 48, 64])
    assert result.interval.low < 0 < result.interval.high and not result.lost
    assert [number for number, _ in plain.RecordingChannel.swapped] == [1, 2, 1, 2, 1], (
        "the second of two blocks starts with the loaded weights"
    )


def attempts(scores: list[float | None]) -> list[SuiteAttempt]:
    results = [CaseAttempt(case=f"c{n}", task_key="k", number=0, episode=f"e{n}", score=score) for n, score in enumerate(scores)]
    return [SuiteAttempt(attempt=result, transcript={}) for result in results]


def verdict_of(before: list[float | None], after: list[float | None], margin: float = 0.05) -> ComparisonVerdict:
    return difference_so_far(attempts(before), attempts(after), alpha=0.05, margin=margin, most=999).verdict


def test_a_verdict_needs_evidence_and_counts_no_unscored_attempt() -> None:
    assert verdict_of([1.0] * 9, [0.0] * 9) is ComparisonVerdict.WORSE
    assert verdict_of([0.0] * 9, [1.0] * 9) is ComparisonVerdict.BETTER
    assert verdict_of([1.0] * 5, [0.0] * 5) is ComparisonVerdict.NOT_ENOUGH
    assert verdict_of([1.0] * 9, [0.0] * 5 + [None] * 4) is ComparisonVerdict.NOT_ENOUGH
    assert verdict_of([1.0] * 400, [1.0] * 400) is ComparisonVerdict.SAME
    assert verdict_of([], []) is ComparisonVerdict.NOT_ENOUGH
    with pytest.raises(UserError, match="scores from 0 to 1"):
        verdict_of([3.0], [1.0])


@pytest.mark.slow
@pytest.mark.parametrize(("change", "least", "most"), [(0.0, 0.0, 0.05), (-0.2, 0.9, 1.0), (0.2, 0.9, 1.0)])
def test_inspecting_after_every_block_keeps_the_error_rate_and_detects_a_difference(change: float, least: float, most: float) -> None:
    """200 comparisons of policies that pass 70% of cases, or 20 points more or fewer, with a look after each of 16 blocks. The evidence
    replaces the verdict, which costs a bisection; the first three comparisons check that both agree."""
    rng, clear = random.Random(5), 0
    for number in range(200):
        before, after = ([float(rng.random() < rate) for _ in range(256)] for rate in (0.7, 0.7 + change))
        changes = [other_score - score for score, other_score in zip(before, after, strict=True)]
        looks = [has_evidence(changes[:n]) for n in range(versus._BLOCK, 257, versus._BLOCK)]
        clear += any(looks)
        if number < 3:
            assert (verdict_of(before, after, margin=0.0) in (ComparisonVerdict.WORSE, ComparisonVerdict.BETTER)) == looks[-1]
    assert least <= clear / 200 <= most


def has_evidence(changes: list[float]) -> bool:
    return max(e_value(changes), e_value([-change for change in changes])) >= 2 / 0.05

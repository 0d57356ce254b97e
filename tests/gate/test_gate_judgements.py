"""Single evaluations of the gate: reports, comparisons, due versions, and versions without a verdict.

The run and its scripted policy are those of gated_run.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.gate import GATE
from agentrl.errors import UserError
from agentrl.failure.case import Suite
from agentrl.gate import gate
from agentrl.gate.gate import Gate, serve_result
from agentrl.gate.verdict import GateOutcome, read_verdict
from agentrl.observe import Rate
from agentrl.records import SandboxSpec, VersionState
from agentrl.version import rollback
from tests.gate import test_rolled_back as plain
from tests.gate.gated_run import RECIPE, Player, evaluate_due, open_run, publish, serve_through, serve_version_2

pytestmark = pytest.mark.usefixtures("scripted")
scripted = plain.scripted


@pytest.fixture
def suite_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few cases suffice for a verdict on the suite, and no case blocks."""
    rule = gate.gate_rule
    monkeypatch.setattr(gate, "gate_rule", lambda config, suite: replace(rule(config, suite), confirm=0, alpha=0.4))


class Reports:
    """Records the calls of a run's tracker."""

    def __init__(self, run: Any) -> None:
        self.stages: list[tuple[str, str]] = []
        self.progress: list[tuple[int, int]] = []
        self.rates: dict[str, Any] = {}
        run.tracker.stage = lambda name, detail="": self.stages.append((name, detail))
        run.tracker.evaluating = lambda done, total: self.progress.append((done, total))
        run.tracker.evaluated = self.rates.__setitem__


def with_image(suite: Suite, case_id: str, image: str) -> Suite:
    """The suite with another image, and so another content hash, for one case."""
    other = SandboxSpec(image=image)
    changed = (replace(case, task=replace(case.task, sandbox=other)) if case.id == case_id else case for case in suite.cases)
    return replace(suite, cases=tuple(changed))


async def test_the_gate_reports_stage_attempts_and_rate(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    reports = Reports(run)
    await Gate.of(run).decide(run.registry.get(0))
    assert reports.stages == [("gate", "version 0: 12 cases, 48 attempts")] and reports.progress[-1] == (48, 48)
    (rate,) = reports.rates["gate 0"].values()
    assert isinstance(rate, Rate) and (rate.value, rate.n) == (1.0, 48) and rate.ci_low < rate.ci_high
    assert run.registry.get(0).evals == {GATE: 1.0} and run.tracker.alerts == [], "a promotion is not an alert"
    await plain.close(run)


@pytest.mark.slow
async def test_a_gate_on_its_own_server_does_not_change_the_stage(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    run.gate_server = SimpleNamespace(policy=Player(run))
    reports = Reports(run)
    await Gate.of(run).decide(run.registry.get(0))
    assert reports.stages == [] and reports.progress == [] and reports.rates["gate 0"]["x"].n == 48
    assert run.gate_server.policy.turn_count == 48 and run.player.turn_count == 0
    await plain.close(run)


@pytest.mark.parametrize("image", ["gone", "none"])
async def test_cases_whose_image_cannot_be_built_are_reported_and_unscored(image: str, tmp_path: Path) -> None:
    """`gone` is the image of one case, `none` that of the others."""
    run = await open_run(tmp_path)
    run.suite = with_image(run.suite, "c03", "gone")
    reports = Reports(run)

    async def prepare(spec: SandboxSpec) -> None:
        if spec.image == image:
            raise UserError("no such image", fix="build it")

    run.sandboxes.prepare = prepare
    await evaluate_due(run)
    (alert,) = run.tracker.alerts
    assert f"gate: the cases of image {image} cannot be run: no such image" in alert
    assert reports.rates["gate 0"]["x"].n == (44 if image == "gone" else 4), "the scored attempts"
    await plain.close(run)


async def test_a_version_without_a_scored_attempt_has_no_verdict_and_no_rate(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    reports = Reports(run)
    say = run.player.say

    def sample_late(turn: int, episode: str) -> str:
        text = say(turn, episode)
        run.player.version = 1
        return text

    run.player.script = sample_late
    await evaluate_due(run)
    assert reports.rates == {} and run.tracker.alerts == ["version 0 is not judged: no attempt was scored"]
    assert run.registry.get(0).state is VersionState.SERVING
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("suite_alone")
async def test_the_three_worst_cases_are_shown_if_only_the_suite_got_worse(tmp_path: Path) -> None:
    """c00 fails as often as before. A score of 0 passes c09, so there is no episode to show."""
    run = await open_run(tmp_path)
    run.recipe = RECIPE.but({"gate.action": "block", "steps": 8})
    run.suite = replace(run.suite, cases=tuple(replace(case, threshold=0.0 if case.id == "c09" else None) for case in run.suite.cases))
    plan = ("good 1", "bad c00-r0", "good 3", "bad c00-r0 c09 c05-r1 c05-r2 c07", "good 5", "bad c00-r0 c01-r0 c02-r0 c02-r1 c04 c03")
    plan += ("good 7", "bad c00-r0 c05-r1 c07")
    for number, weights in enumerate(plan, 1):
        publish(run, number, number - 1, weights)
        await serve_through(run, number)
    regressions = {}
    for number in (2, 4, 6, 8):
        verdict = read_verdict(tmp_path, number)
        assert verdict is not None and (verdict.outcome is GateOutcome.PROMOTED) == (number == 2)
        regressions[number] = [(regression.case, regression.before_episode, regression.episode) for regression in verdict.regressions]
    assert regressions == {
        2: [],
        4: [(case, f"gate000002-{case}-r0-a0", f"gate000004-{case}-r{n}-a0") for case, n in (("c07", 0), ("c05", 1))],
        6: [(case, f"gate000002-{case}-r0-a0", f"gate000006-{case}-r0-a0") for case in ("c03", "c04", "c02")],
        8: [(case, f"gate000002-{case}-r0-a0", f"gate000008-{case}-r{n}-a0") for case, n in (("c07", 0), ("c05", 1))],
    }
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("suite_alone")
async def test_a_changed_case_is_neither_compared_nor_shown(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    await serve_version_2(run, "good 1", "bad c03 c05 c06")
    run.suite = with_image(run.suite, "c03", "another")
    await evaluate_due(run)
    verdict = read_verdict(tmp_path, 2)
    assert verdict is not None and verdict.judgement is not None and verdict.outcome is GateOutcome.ROLLED_BACK
    assert verdict.judgement.cases == 11 and [regression.case for regression in verdict.regressions] == ["c05", "c06"]
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("suite_alone")
async def test_a_case_without_scores_takes_no_slot_among_the_cases_that_are_shown(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    await serve_version_2(run, "good 1", "bad c04 c05 c06")
    say = run.player.say

    def sample_late(turn: int, episode: str) -> str:
        text = say(turn, episode)
        run.player.version = 1 if "-c01-" in episode else run.player.version
        return text

    run.player.script = sample_late
    await evaluate_due(run)
    verdict = read_verdict(tmp_path, 2)
    assert verdict is not None and verdict.judgement is not None and verdict.judgement.cases == 11
    assert [regression.case for regression in verdict.regressions] == ["c04", "c05", "c06"]
    await plain.close(run)


@pytest.mark.slow
async def test_a_suite_whose_cases_all_changed_starts_with_a_new_baseline(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    await serve_version_2(run, "good 1", "bad c03")
    for case in run.suite.cases:
        run.suite = with_image(run.suite, case.id, "another")
    await evaluate_due(run)
    verdict = read_verdict(tmp_path, 2)
    assert verdict is not None and (verdict.outcome, verdict.reference) == (GateOutcome.REFERENCE, None)
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("meanwhile", ["rolled back", "deleted", "rebuilt"])
async def test_a_version_that_the_learner_retracts_during_its_attempts_gets_no_verdict(meanwhile: str, tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    await serve_version_2(run, "good 1", "good 2")

    def retract(turn: int, episode: str) -> str:
        text = run.player.say(turn, episode)
        if run.player.turn_count == 2 * 48:
            if meanwhile == "rolled back":
                run.registry.set_state(2, VersionState.ROLLED_BACK)
            else:
                run.registry.reconcile(1)
            if meanwhile == "rebuilt":
                publish(run, 2, 1, "others")
        return text

    run.player.script = retract
    await evaluate_due(run)
    assert run.player.turn_count == 2 * 48 and read_verdict(tmp_path, 2) is None and run.tracker.alerts == []
    await plain.close(run)


@pytest.mark.slow
async def test_versions_are_due_at_the_recipes_interval_from_the_newest_with_a_verdict(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    run.recipe = RECIPE.but({"steps": 5})
    for number in range(1, 6):
        publish(run, number, number - 1, f"good {number}")

    async def due_after_serving(number: int) -> list[int]:
        await run.served.swap(run.registry.get(number))
        return [version.number for version in Gate.of(run).due_versions()]

    assert await due_after_serving(1) == [0]
    assert await due_after_serving(2) == [0, 2] and await due_after_serving(3) == [0, 2] and await due_after_serving(4) == [0, 2, 4]
    await Gate.of(run).decide(run.registry.get(2))
    assert [version.number for version in Gate.of(run).due_versions()] == [2, 4]
    assert await due_after_serving(5) == [2, 4, 5], "the last version is always due"
    run.registry.reconcile(4)
    assert Gate.of(run).due(run.served.version) is None and [version.number for version in Gate.of(run).due_versions()] == [2, 4], (
        "version 5 was retracted"
    )
    publish(run, 5, 4, "others")
    assert Gate.of(run).due(run.served.version) is None and [version.number for version in Gate.of(run).due_versions()] == [2, 4], (
        "the new version 5 does not serve yet"
    )
    await plain.close(run)


async def test_a_rolled_back_version_is_not_evaluated_unless_it_is_the_last(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    run.recipe = RECIPE.but({"steps": 3})
    for number in (1, 2, 3):
        publish(run, number, number - 1, f"good {number}")
    versions = run.registry.versions()
    assert [Gate.of(run).is_rejected(version) for version in versions] == [False] * 4
    bad = versions[1]
    rollback.request_rollback(
        tmp_path / "versions", rollback.RollbackRequest(version=1, sha256=bad.sha256, to=0, to_sha256=versions[0].sha256, reason="worse")
    )
    assert [Gate.of(run).is_rejected(version) for version in versions] == [True, True, True, False]
    run.registry.set_state(1, VersionState.ROLLED_BACK)
    assert [Gate.of(run).is_rejected(run.registry.get(version.number)) for version in versions] == [False, True, False, False]
    await plain.close(run)


@pytest.mark.slow
async def test_the_serving_version_stays_if_nothing_else_was_promoted(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    await serve_result(run.registry, run.served, run.tracker.alert)
    await evaluate_due(run)
    await serve_result(run.registry, run.served, run.tracker.alert)
    assert run.served.version == 0 and run.tracker.alerts == [] and plain.RecordingChannel.swapped == []
    await plain.close(run)

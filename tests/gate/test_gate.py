"""The gate of a run: an unchanged policy is promoted, a worse one is rolled back, and a crash in between loses nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config.gate import GATE
from agentrl.errors import StoreError
from agentrl.failure.collection import Collection
from agentrl.gate import gate
from agentrl.gate.gate import Gate, first_version_to_serve, promoted_result, serve_result
from agentrl.gate.rule import RuleResult
from agentrl.gate.verdict import GateOutcome, GateVerdict, evaluation_folder, first_different_turn, read_verdict, read_verdicts
from agentrl.observe import write_report
from agentrl.records import ADAPTER, VersionState, codec
from agentrl.run.versions import StepRecords
from agentrl.session import measure
from agentrl.session.opening import Progress, Run
from agentrl.version import FolderRegistry, rollback
from agentrl.version.rollback import BUDGET_STEPS
from tests.gate import test_rolled_back as plain
from tests.gate.gated_run import RECIPE, Killed, answer_as_learner, evaluate_due, open_run, publish, serve_through, serve_version_2, states

pytestmark = pytest.mark.slow
scripted = plain.scripted


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_the_gate_evaluates_the_last_version_of_a_stopped_run_without_a_step_limit(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    run.recipe, run.progress = RECIPE.but(steps=None), Progress(stop_at=math.inf, learning=True)
    await serve_version_2(run, "good 1", "good 2")
    publish(run, 3, 2, "good 3")
    gate = Gate.of(run)
    assert gate is not None and gate.due(3) is None
    Run.stop_after_step(run)
    assert run.progress.end == run.progress.stop_at == 3 and not run.progress.interrupted and not gate.is_concluded()
    await serve_through(run, 3)
    assert gate.is_concluded() and states(run)[3] == "promoted"


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_version_that_fails_a_case_is_rolled_back_and_reported_with_both_episodes(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    publish(run, 1, 0, "good 1")
    publish(run, 2, 1, "good 2")
    publish(run, 3, 2, "bad c03")
    publish(run, 4, 3, "bad c03 c07")
    await serve_through(run, 4)
    assert [(verdict.version, verdict.outcome, verdict.reference) for verdict in read_verdicts(tmp_path)] == [
        (0, GateOutcome.REFERENCE, None),
        (2, GateOutcome.PROMOTED, 0),
        (4, GateOutcome.ROLLED_BACK, 2),
    ]
    assert states(run) == ["promoted", "served", "promoted", "served", "serving"]
    verdict = read_verdict(tmp_path, 4)
    assert verdict is not None and verdict.judgement is not None
    assert [(regression.case, regression.turn, regression.before_episode, regression.episode) for regression in verdict.regressions] == [
        (case, 1, f"gate000002-{case}-r0-a0", f"gate000004-{case}-r0-a0") for case in ("c03", "c07")
    ]
    assert {(drop.passed, drop.tries) for drop in verdict.judgement.regressed} == {(0, 28)}
    assert run.registry.get(4).evals[GATE] == pytest.approx(10 / 12)

    publish(run, 5, 4, "bad c03 c07")  # the learner was a step ahead
    await serve_through(run, 5)
    request = answer_as_learner(run, 6)
    assert (request.version, request.to) == (4, 2) and "case c03: 4 of 4 before, 0 of 28 now" in request.reason
    await serve_through(run, 6)
    assert states(run) == ["promoted", "served", "promoted", "rolled_back", "rolled_back", "rolled_back", "promoted"]
    assert Gate.of(run).is_concluded() and promoted_result(run.registry, run.folder).number == 6
    assert any(alert.startswith("version 4 is rolled back: case c03") and "at turn 1" in alert for alert in run.tracker.alerts)
    await plain.close(run)
    with Collection(tmp_path) as collection:
        assert collection.counts("phase", "step", "why")[("gate", 4, "regressed")] == 56, "all 28 attempts at each of the two cases"

    page = write_report(tmp_path).read_text()
    assert "Success on the suite by version" in page and "version 4 was rolled back: case c03, with the first difference at turn 1" in page
    assert "version 2, passed" in page and "version 4, failed" in page
    listing = CliRunner().invoke(app, ["versions", "list", str(tmp_path)])
    assert listing.exit_code == 0, listing.output
    assert "gate: rolled back: case c03" in listing.output and "restored from version 2" in listing.output
    assert "case c07: turn 1 is the first that differs" in listing.output
    comparison = CliRunner().invoke(app, ["compare", f"{tmp_path}@2", f"{tmp_path}@4", "--json"])
    report = json.loads(comparison.output)
    assert report["lost"] == ["c03", "c07"] and report["effect"] == pytest.approx(-2 / 12) and report["attempts"] == 48
    assert "verdict" in CliRunner().invoke(app, ["compare", f"{tmp_path}@2", f"{tmp_path}@4"]).output


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_resumed_driver_completes_the_gates_work_and_evaluates_no_version_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies while writing the evaluation, then after the verdict but before its consequences, then after them."""
    run = await open_run(tmp_path)
    await serve_version_2(run, "bad", "bad c01")

    def die(*_: object, **__: object) -> None:
        raise Killed

    points = ("agentrl.evaluation.results.commit_folder", "agentrl.gate.gate.Gate._apply", "agentrl.gate.gate.rollback.request_rollback")
    for point in points:
        with monkeypatch.context() as patch:
            patch.setattr(point, die)
            with pytest.raises(Killed):
                await evaluate_due(run)
        assert (read_verdict(tmp_path, 2) is None) == (point == points[0])
        assert rollback.pending_request(tmp_path / "versions", run.registry) is None
    turns_before = run.player.turn_count
    await evaluate_due(run)
    request = rollback.pending_request(tmp_path / "versions", run.registry)
    assert request is not None and (request.version, request.to) == (2, 0)
    await evaluate_due(run)
    assert run.player.turn_count == turns_before, "the verdict is not computed again"

    answer_as_learner(run, 3)
    assert rollback.pending_request(tmp_path / "versions", run.registry) is None
    assert first_version_to_serve(run.registry, Gate.of(run)).number == 3, "version 0 is promoted, but its successor serves"
    await run.served.swap(run.registry.get(3))
    await StepRecords.of(run).record_missing()
    assert measure.recorded_steps(tmp_path) == {1, 2, 3}
    await plain.close(run)
    with Collection(tmp_path) as collection:
        assert collection.counts("phase", "step", "why")[("gate", 2, "regressed")] == 28, "no attempt is counted twice"


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("meanwhile", ["rolled back", "deleted", "rebuilt", "a full disk"])
async def test_a_version_that_passes_while_being_retracted_is_reported_and_not_promoted(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await open_run(tmp_path)
    await serve_version_2(run, "good 1", "good 2")
    set_state = run.registry.set_state

    def set_state_after_the_event(number: int, state: VersionState, **options: Any) -> None:
        if state is VersionState.PROMOTED and meanwhile == "rolled back":
            set_state(number, VersionState.ROLLED_BACK)
        if state is VersionState.PROMOTED and meanwhile in ("deleted", "rebuilt"):
            run.registry.reconcile(1)
        if state is VersionState.PROMOTED and meanwhile == "rebuilt":
            publish(run, 2, 1, "others")
            set_state(2, VersionState.SERVING)
        if state is VersionState.PROMOTED and meanwhile == "a full disk":
            raise StoreError("No space left on device")
        set_state(number, state, **options)

    monkeypatch.setattr(run.registry, "set_state", set_state_after_the_event)
    if meanwhile == "a full disk":
        with pytest.raises(StoreError, match="No space left"):
            await evaluate_due(run)
    else:
        await evaluate_due(run)
        assert any("version 2 passed the gate but is not promoted" in alert for alert in run.tracker.alerts)
    assert run.registry.latest(VersionState.PROMOTED).number == 0
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_a_verdict_of_another_version_or_with_an_invalid_target_is_reported(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    await serve_version_2(run, "bad", "bad c01")
    await evaluate_due(run)
    path = tmp_path / "gate/000002/verdict.json"
    stored = json.loads(path.read_text())
    changes: list[dict[str, Any]] = [{"version": 0}, {"reference": None}, {"reference": 2}, {"reference": 1}]
    for change in changes:
        path.write_text(json.dumps(stored | change))
        with pytest.raises(StoreError, match=r"verdict\.json"):
            await evaluate_due(run)
    path.write_text(json.dumps(stored))
    await evaluate_due(run)
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_the_result_is_the_last_promoted_version_if_the_newest_is_blocked(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    run.recipe = RECIPE.but({"gate.action": "block", "steps": 4})
    for number, weights in ((1, "good 1"), (2, "good 2"), (3, "good 3"), (4, "awful")):
        publish(run, number, number - 1, weights)
    await serve_through(run, 4)
    assert [verdict.outcome for verdict in read_verdicts(tmp_path)] == [GateOutcome.REFERENCE, GateOutcome.PROMOTED, GateOutcome.BLOCKED]
    assert rollback.pending_request(tmp_path / "versions", run.registry) is None
    assert Gate.of(run).is_concluded() and promoted_result(run.registry, run.folder).number == 2
    await serve_result(run.registry, run.served, run.tracker.alert)
    assert "version 4 is not promoted; the result of the run is version 2" in run.tracker.alerts
    assert run.served.version == 2 and states(run) == ["promoted", "served", "promoted", "served", "served"]
    assert first_version_to_serve(run.registry, Gate.of(run)).number == 2, "a finished run resumes with its result"
    extended = SimpleNamespace(**{**vars(run), "recipe": RECIPE.but({"steps": 8})})
    assert first_version_to_serve(extended.registry, Gate.of(extended)).number == 4, "a run with more steps resumes with its newest weights"  # type: ignore[arg-type]
    assert measure.gate_problems(tmp_path, finished=True) == ()
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_a_case_has_its_own_repeats_and_threshold(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    overrides = {"c03": {"repeats": 6}, "c05": {"repeats": 6, "threshold": 0.0}}
    run.suite = replace(run.suite, cases=tuple(replace(case, **overrides.get(case.id, {})) for case in run.suite.cases))
    publish(run, 1, 0, "good 1")
    publish(run, 2, 1, "bad c03 c05")
    await serve_through(run, 2)
    verdict = read_verdict(tmp_path, 2)
    assert verdict is not None and verdict.judgement is not None and verdict.figures is not None
    assert [(drop.case, drop.passed, drop.tries, drop.before_tries) for drop in verdict.judgement.regressed] == [("c03", 0, 6 + 24, 6)]
    assert verdict.figures.attempts == 10 * 4 + 2 * 6 and verdict.figures.pass_at_1 == pytest.approx(11 / 12), "c05 has threshold 0"
    comparison = json.loads(CliRunner().invoke(app, ["compare", f"{tmp_path}@0", f"{tmp_path}@2", "--json"]).output)
    assert comparison["lost"] == ["c03", "c05"], "scores are compared unchanged"
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_run_whose_gate_promoted_nothing_reports_a_problem(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    run.recipe = RECIPE.but({"gate.action": "block", "steps": 2})
    publish(run, 1, 0, "awful 1")
    publish(run, 2, 1, "awful")
    await serve_through(run, 2)
    assert promoted_result(run.registry, run.folder) is None
    (problem,) = measure.gate_problems(tmp_path, finished=True)
    assert "promoted no version after the first" in problem and "the suite's score fell by 100.0 points" in problem

    run.registry.set_state(2, VersionState.PROMOTED)
    assert promoted_result(run.registry, run.folder).number == 2
    adapter = {f"base_model.model.q.lora_{part}.weight": torch.full((2, 2), value) for part, value in (("A", 1.0), ("B", 0.0))}
    save_file(adapter, tmp_path / "versions/000002" / ADAPTER)
    assert promoted_result(run.registry, run.folder) is None, "with adapters, a rollback to version 0 has its own hash"
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_old_rollbacks_do_not_count_toward_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_ROLLBACKS", 1)
    run = await open_run(tmp_path)
    old = GateVerdict(version=5, sha256="0" * 64, outcome=GateOutcome.ROLLED_BACK, reason="worse", at="now", reference=0)
    evaluation_folder(tmp_path, 5).mkdir(parents=True)
    (evaluation_folder(tmp_path, 5) / "verdict.json").write_bytes(codec.to_json(old))
    worse, run_gate = RuleResult(enough=True, blocked=True, cases=9, unscored=0), Gate.of(run)
    assert run_gate is not None
    outcomes = [run_gate._outcome(worse, number)[0] for number in (4, 6, 4 + BUDGET_STEPS, 5 + BUDGET_STEPS)]
    assert outcomes == [GateOutcome.ROLLED_BACK, GateOutcome.BLOCKED, GateOutcome.BLOCKED, GateOutcome.ROLLED_BACK]
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_rollbacks_end_at_their_limit_and_other_weights_are_evaluated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_ROLLBACKS", 1)
    run = await open_run(tmp_path)
    run.recipe = RECIPE.but({"gate.every": 1, "steps": 9})
    await evaluate_due(run)
    publish(run, 1, 0, "bad c01")
    await serve_through(run, 1)
    answer_as_learner(run, 2)
    publish(run, 3, 2, "bad c02")
    await serve_through(run, 3)
    blocked = read_verdict(tmp_path, 3)
    assert (
        blocked is not None
        and blocked.outcome is GateOutcome.BLOCKED
        and "after 1 rollbacks within 256 versions the gate only blocks" in blocked.reason
    )
    run.registry.reconcile(2)
    await run.served.fall_back(run.registry.get(2))
    publish(run, 3, 2, "good 3")
    await serve_through(run, 3)
    second = read_verdict(tmp_path, 3)
    assert second is not None and second.outcome is GateOutcome.PROMOTED and second.sha256 != blocked.sha256
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_no_rollback_is_requested_after_the_last_version(tmp_path: Path) -> None:
    """The learner has ended: the request would remain until the run got more steps, and would then roll back later promotions."""
    run = await open_run(tmp_path)
    run.recipe = RECIPE.but({"steps": 3})
    for number, weights in enumerate(("good 1", "bad c03", "good 3"), 1):
        publish(run, number, number - 1, weights)
    await serve_through(run, 3)
    assert [(verdict.version, verdict.outcome) for verdict in read_verdicts(tmp_path)] == [
        (0, GateOutcome.REFERENCE),
        (2, GateOutcome.BLOCKED),
        (3, GateOutcome.PROMOTED),
    ]
    assert rollback.pending_request(tmp_path / "versions", run.registry) is None
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_request_that_came_too_late_is_void_once_the_last_version_is_promoted(tmp_path: Path) -> None:
    """The learner was already in its last step. With more steps the run continues from the promoted version."""
    run = await open_run(tmp_path)
    run.recipe = RECIPE.but({"steps": 3})
    publish(run, 1, 0, "good 1")
    publish(run, 2, 1, "bad c03")
    await serve_through(run, 2)
    assert rollback.pending_request(tmp_path / "versions", run.registry) is not None
    publish(run, 3, 2, "good 3")
    await serve_through(run, 3)
    assert [(v.version, v.outcome) for v in read_verdicts(tmp_path)][1:] == [(2, GateOutcome.ROLLED_BACK), (3, GateOutcome.PROMOTED)]
    assert rollback.pending_request(tmp_path / "versions", run.registry) is None
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_attempts_of_another_version_are_unscored_and_too_few_scores_give_no_verdict(tmp_path: Path) -> None:
    run = await open_run(tmp_path)
    await evaluate_due(run)
    publish(run, 1, 0, "good 1")
    publish(run, 2, 1, "good 2")
    run.progress.stop_at = 2

    def at_another_version(script: Callable[[int, str], str]) -> Callable[[int, str], str]:
        def sample_late(turn: int, episode: str) -> str:
            text = script(turn, episode)
            run.player.version = 1 if episode.startswith("gate000002") else run.player.version
            return text

        return sample_late

    run.player.script = at_another_version(run.player.say)
    await serve_through(run, 2)
    verdict = read_verdict(tmp_path, 2)
    assert verdict is not None and verdict.outcome is GateOutcome.UNJUDGED and "only 0 cases" in verdict.reason
    assert run.registry.get(2).state is VersionState.SERVING and rollback.pending_request(tmp_path / "versions", run.registry) is None
    first = json.loads((tmp_path / "gate/000002/attempts.jsonl").read_text().splitlines()[0])
    assert first["score"] is None and "version 1 sampled some of it" in first["reason"]
    await plain.close(run)


def test_the_first_different_turn_of_two_episodes() -> None:
    def transcript(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"messages": [{"role": "assistant", "content": text, "tool_calls": [{"name": tool}]} for text, tool in turns]}

    before = transcript(("a", "python"), ("b", "submit"))
    assert first_different_turn(before, before) is None
    assert first_different_turn(before, transcript(("other words", "python"), ("b", "python"))) == 2, "other calls count before other text"
    assert first_different_turn(before, transcript(("other words", "python"), ("b", "submit"))) == 1
    assert (
        first_different_turn(before, transcript(("a", "python"))) == first_different_turn(transcript(("a", "python")), before) == 2
        and first_different_turn({}, {}) is None
    )


def test_a_rollback_request_is_void_once_its_version_has_other_weights(tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path / "versions")
    for number in range(3):
        plain.publish(registry, number, number - 1 if number else None, b"%d" % number)
    version = registry.get(2)
    assert version is not None and rollback.pending_request(tmp_path, registry) is None
    rollback.request_rollback(tmp_path, rollback.RollbackRequest(version=2, sha256=version.sha256, to=0, to_sha256="x", reason="\ud800"))
    assert (request := rollback.pending_request(tmp_path, registry)) is not None and request.reason == "\N{REPLACEMENT CHARACTER}"
    registry.reconcile(1)
    assert rollback.pending_request(tmp_path, registry) is None
    plain.publish(registry, 2, 1, b"other")
    assert rollback.pending_request(tmp_path, registry) is None
    with pytest.raises(ValueError, match="is not older"):
        rollback.RollbackRequest(version=2, sha256="", to=2, to_sha256="", reason="")

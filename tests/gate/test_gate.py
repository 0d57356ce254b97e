"""The gate of a run: an unchanged policy is promoted, a worse one is rolled back, and a crash in between loses nothing.

Server, channel and policy are scripted: a version's weights say which cases it passes. Registry, store, suite,
episodes, verifier, rule, tracker and the loop's own code are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from agentrl.agent import TurnLoop
from agentrl.cli import app
from agentrl.config.gate import GATE, GateConfig
from agentrl.errors import StoreError
from agentrl.failure.case import Case, Suite
from agentrl.failure.collection import Collection
from agentrl.gate import gate
from agentrl.gate.gate import Gate, first_version_to_serve, promoted_result, serve_result
from agentrl.gate.rule import RuleResult
from agentrl.gate.schedule import schedule_gate
from agentrl.gate.verdict import GateOutcome, GateVerdict, evaluation_folder, first_different_turn, read_verdict, read_verdicts
from agentrl.observe import write_report
from agentrl.records import ADAPTER, Episode, Message, SandboxSpec, Score, Split, Task, VersionState, codec
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.run import loop
from agentrl.run.versions import StepRecords
from agentrl.session import measure
from agentrl.session.opening import Progress, Run
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from agentrl.version import FolderRegistry, rollback
from agentrl.version.rollback import BUDGET_STEPS
from tests.chats import chat_of, shared_tokenizer
from tests.gate import test_rolled_back as plain

pytestmark = pytest.mark.slow

RECIPE = plain.RECIPE.but(gate=GateConfig(suite="evals/x", every=2, repeats=4), steps=6)
scripted = plain.scripted
CASES = 12


async def verdict(task: Task, episode: Episode) -> Score:
    return Score(value=float(episode.answer == "pass"))


def make_suite() -> Suite:
    def task(name: str) -> Task:
        return Task(
            id=name,
            family="f",
            prompt=(Message(role="user", content=f"case {name}"),),
            tools=("submit",),
            sandbox=SandboxSpec(image="none"),
            verifiers=("tests.gate.test_gate:verdict",),
            data={},
            split=Split.HELDOUT,
        )

    names = [f"c{number:02d}" for number in range(CASES)]
    return Suite(folder=Path("x"), name="x", cases=tuple(Case(id=name, task=task(name)) for name in names))


class Killed(BaseException):
    """The driver dies here."""


class Player(ScriptedPolicy):
    """Submits the answers in the served version's weights.

    `good` passes every case. `bad c03 c07-r1` fails all attempts at c03 and attempt 1 at c07. `awful` fails everything.
    """

    cache_use = None

    def __init__(self, run: Any) -> None:
        super().__init__(shared_tokenizer(), self.say)
        self.run, self.asked = run, 0

    def episode(self, episode_id: str, task_key: str) -> Any:
        return nullcontext()

    def say(self, turn: int, episode: str) -> str:
        self.asked += 1
        self.version = self.run.served.version
        weights = (self.run.folder / f"versions/{self.version:06d}/model.safetensors").read_text().split()
        case, attempt = episode.split("-")[1:3]
        failed = not {case, f"{case}-{attempt}"}.isdisjoint(weights[1:]) or weights == ["awful"]
        return f"<tool_call>\n{json.dumps({'name': 'submit', 'arguments': {'answer': 'fail' if failed else 'pass'}})}\n</tool_call>"


async def opened(run_dir: Path) -> Any:
    """A run at version 0, which passes every case."""
    run = await plain.opened(run_dir)
    run.recipe, run.suite, run.progress = RECIPE, make_suite(), Progress(stop_at=RECIPE.step_limit)
    run.sandboxes = ScriptedSandboxes(printing(""))
    (run_dir / "versions/000000/model.safetensors").write_text("good")
    run.registry._write(replace(run.registry.get(0), sha256=plain.sha256_file(run_dir / "versions/000000/model.safetensors")))
    base = run.registry.get(0)
    run.base_version.return_value, run.served.sha256 = base, base.sha256
    (run_dir / "recipe.json").write_text(RECIPE.model_dump_json())
    equip(run)
    return run


def equip(run: Any) -> None:
    run.player = Player(run)
    chat = chat_of(run.player.tokenizer)
    episodes = EpisodeRunner(
        policy=run.player,
        sandboxes=run.sandboxes,
        agent=TurnLoop(chat=chat),
        sampling=Sampling(),
        max_model_len=1000,
        request_timeout_s=60.0,
    )
    run.groups = GroupRunner(runner=episodes, scorer=TaskScorer(), slots=asyncio.Semaphore(64), group_size=1, max_retries=0)


def publish(run: Any, number: int, parent: int, weights: str) -> None:
    plain.publish(run.registry, number, parent, weights.encode())


def learner_answers(run: Any, number: int) -> rollback.RollbackRequest:
    """The learner's step `number - 1`; tests/learner/test_gate.py tests the real one."""
    request = rollback.pending_request(run.folder / "versions", run.registry)
    assert request is not None
    weights = (run.folder / f"versions/{request.to:06d}/model.safetensors").read_text()
    publish(run, number, request.to, weights)
    for refused in range(request.to + 1, number):
        run.registry.set_state(refused, VersionState.ROLLED_BACK)
    return request


async def looked(run: Any) -> None:
    async with schedule_gate(Gate.of(run), run.progress) as gate:
        await gate.evaluate_due()


async def serving_the_second(run: Any, one: str, two: str) -> None:
    """Version 0 has a verdict; version 2, which is due, serves after version 1 without one. These are their weights."""
    await looked(run)
    publish(run, 1, 0, one)
    publish(run, 2, 1, two)
    run.registry.set_state(1, VersionState.SERVING)
    await run.served.swap(run.registry.get(2))


async def served_through(run: Any, last: int) -> None:
    run.progress.stop_at = last
    async with asyncio.timeout(60):
        await loop._swap_versions(run)


def states(run: Any) -> list[str]:
    return [str(one.state) for one in run.registry.versions()]


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_the_gate_decides_on_the_version_at_which_a_run_without_a_last_step_is_stopped(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    run.recipe, run.progress = RECIPE.but(steps=None), Progress(stop_at=math.inf, learning=True)
    await serving_the_second(run, "good 1", "good 2")
    publish(run, 3, 2, "good 3")
    gate = Gate.of(run)
    assert gate is not None and gate.due(3) is None
    Run.stop_after_step(run)
    assert run.progress.end == run.progress.stop_at == 3 and not run.progress.interrupted and not gate.is_concluded()
    await served_through(run, 3)
    assert gate.is_concluded() and states(run)[3] == "promoted"


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_version_that_fails_a_case_is_rolled_back_and_reported_with_both_episodes(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    publish(run, 1, 0, "good 1")
    publish(run, 2, 1, "good 2")
    publish(run, 3, 2, "bad c03")
    publish(run, 4, 3, "bad c03 c07")
    await served_through(run, 4)
    assert [(one.version, one.outcome, one.reference) for one in read_verdicts(tmp_path)] == [
        (0, GateOutcome.REFERENCE, None),
        (2, GateOutcome.PROMOTED, 0),
        (4, GateOutcome.ROLLED_BACK, 2),
    ]
    assert states(run) == ["promoted", "served", "promoted", "served", "serving"]
    found = read_verdict(tmp_path, 4)
    assert found is not None and found.judgement is not None
    assert [(one.case, one.turn, one.before_episode, one.episode) for one in found.regressions] == [
        (case, 1, f"gate000002-{case}-r0-a0", f"gate000004-{case}-r0-a0") for case in ("c03", "c07")
    ]
    assert {(one.passed, one.tries) for one in found.judgement.regressed} == {(0, 28)}
    assert run.registry.get(4).evals[GATE] == pytest.approx(10 / 12)

    publish(run, 5, 4, "bad c03 c07")  # the learner was a step ahead
    await served_through(run, 5)
    request = learner_answers(run, 6)
    assert (request.version, request.to) == (4, 2) and "case c03: 4 of 4 before, 0 of 28 now" in request.reason
    await served_through(run, 6)
    assert states(run) == ["promoted", "served", "promoted", "rolled_back", "rolled_back", "rolled_back", "promoted"]
    assert Gate.of(run).is_concluded() and promoted_result(run.registry, run.folder).number == 6
    assert any(said.startswith("version 4 is rolled back: case c03") and "at turn 1" in said for said in run.tracker.said)
    await plain.close(run)
    with Collection(tmp_path) as collection:
        assert collection.counts("phase", "step", "why")[("gate", 4, "regressed")] == 56, "all 28 attempts at each of the two cases"

    page = write_report(tmp_path).read_text()
    assert "Success on the suite by version" in page and "version 4 was rolled back: case c03, with the first difference at turn 1" in page
    assert "version 2, passed" in page and "version 4, failed" in page
    shown = CliRunner().invoke(app, ["versions", "list", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "gate: rolled back: case c03" in shown.output and "restored from version 2" in shown.output
    assert "case c07: turn 1 is the first that differs" in shown.output
    compared = CliRunner().invoke(app, ["compare", f"{tmp_path}@2", f"{tmp_path}@4", "--json"])
    told = json.loads(compared.output)
    assert told["lost"] == ["c03", "c07"] and told["effect"] == pytest.approx(-2 / 12) and told["attempts"] == 48
    assert "verdict" in CliRunner().invoke(app, ["compare", f"{tmp_path}@2", f"{tmp_path}@4"]).output


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_resumed_driver_completes_the_gates_work_and_evaluates_no_version_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while writing the evaluation, then after the verdict but before its consequences, then after them."""
    run = await opened(tmp_path)
    await serving_the_second(run, "bad", "bad c01")

    def die(*_: object, **__: object) -> None:
        raise Killed

    points = ("agentrl.evaluation.results.commit_folder", "agentrl.gate.gate.Gate._apply", "agentrl.gate.gate.rollback.request_rollback")
    for point in points:
        with monkeypatch.context() as patch:
            patch.setattr(point, die)
            with pytest.raises(Killed):
                await looked(run)
        assert (read_verdict(tmp_path, 2) is None) == (point == points[0])
        assert rollback.pending_request(tmp_path / "versions", run.registry) is None
    asked = run.player.asked
    await looked(run)
    request = rollback.pending_request(tmp_path / "versions", run.registry)
    assert request is not None and (request.version, request.to) == (2, 0)
    await looked(run)
    assert run.player.asked == asked, "the verdict stands"

    learner_answers(run, 3)
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
@pytest.mark.parametrize("meanwhile", ["rolled back", "deleted", "made anew", "a full disk"])
async def test_a_version_that_passes_while_being_retracted_is_reported_and_not_promoted(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await opened(tmp_path)
    await serving_the_second(run, "good 1", "good 2")
    change = run.registry.set_state

    def at_the_same_moment(number: int, state: VersionState, **same: Any) -> None:
        if state is VersionState.PROMOTED and meanwhile == "rolled back":
            change(number, VersionState.ROLLED_BACK)
        if state is VersionState.PROMOTED and meanwhile in ("deleted", "made anew"):
            run.registry.reconcile(1)
        if state is VersionState.PROMOTED and meanwhile == "made anew":
            publish(run, 2, 1, "others")
            change(2, VersionState.SERVING)
        if state is VersionState.PROMOTED and meanwhile == "a full disk":
            raise StoreError("No space left on device")
        change(number, state, **same)

    monkeypatch.setattr(run.registry, "set_state", at_the_same_moment)
    if meanwhile == "a full disk":
        with pytest.raises(StoreError, match="No space left"):
            await looked(run)
    else:
        await looked(run)
        assert any("version 2 passed the gate but is not promoted" in said for said in run.tracker.said)
    assert run.registry.latest(VersionState.PROMOTED).number == 0
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_a_verdict_of_another_version_or_with_an_invalid_target_is_reported(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    await serving_the_second(run, "bad", "bad c01")
    await looked(run)
    path = tmp_path / "gate/000002/verdict.json"
    said = json.loads(path.read_text())
    changes: list[dict[str, Any]] = [{"version": 0}, {"reference": None}, {"reference": 2}, {"reference": 1}]
    for changed in changes:
        path.write_text(json.dumps(said | changed))
        with pytest.raises(StoreError, match=r"verdict\.json"):
            await looked(run)
    path.write_text(json.dumps(said))
    await looked(run)
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_the_result_is_the_last_promoted_version_if_the_newest_is_blocked(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    run.recipe = RECIPE.but({"gate.action": "block", "steps": 4})
    for number, weights in ((1, "good 1"), (2, "good 2"), (3, "good 3"), (4, "awful")):
        publish(run, number, number - 1, weights)
    await served_through(run, 4)
    assert [one.outcome for one in read_verdicts(tmp_path)] == [GateOutcome.REFERENCE, GateOutcome.PROMOTED, GateOutcome.BLOCKED]
    assert rollback.pending_request(tmp_path / "versions", run.registry) is None
    assert Gate.of(run).is_concluded() and promoted_result(run.registry, run.folder).number == 2
    await serve_result(run.registry, run.served, run.tracker.alert)
    assert "version 4 is not promoted; the result of the run is version 2" in run.tracker.said
    assert run.served.version == 2 and states(run) == ["promoted", "served", "promoted", "served", "served"]
    assert first_version_to_serve(run.registry, Gate.of(run)).number == 2, "a finished run resumes with its result"
    longer = SimpleNamespace(**{**vars(run), "recipe": RECIPE.but({"steps": 8})})
    assert first_version_to_serve(longer.registry, Gate.of(longer)).number == 4, "a run with more steps resumes with its newest weights"  # type: ignore[arg-type]
    assert measure.gate_problems(tmp_path, finished=True) == ()
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_a_case_has_its_own_repeats_and_threshold(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    own = {"c03": {"repeats": 6}, "c05": {"repeats": 6, "threshold": 0.0}}
    run.suite = replace(run.suite, cases=tuple(replace(case, **own.get(case.id, {})) for case in run.suite.cases))
    publish(run, 1, 0, "good 1")
    publish(run, 2, 1, "bad c03 c05")
    await served_through(run, 2)
    found = read_verdict(tmp_path, 2)
    assert found is not None and found.judgement is not None and found.figures is not None
    assert [(one.case, one.passed, one.tries, one.before_tries) for one in found.judgement.regressed] == [("c03", 0, 6 + 24, 6)]
    assert found.figures.attempts == 10 * 4 + 2 * 6 and found.figures.pass_at_1 == pytest.approx(11 / 12), "c05 has threshold 0"
    compared = json.loads(CliRunner().invoke(app, ["compare", f"{tmp_path}@0", f"{tmp_path}@2", "--json"]).output)
    assert compared["lost"] == ["c03", "c05"], "scores are compared unchanged"
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_run_whose_gate_promoted_nothing_says_so(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    run.recipe = RECIPE.but({"gate.action": "block", "steps": 2})
    publish(run, 1, 0, "awful 1")
    publish(run, 2, 1, "awful")
    await served_through(run, 2)
    assert promoted_result(run.registry, run.folder) is None
    (problem,) = measure.gate_problems(tmp_path, finished=True)
    assert "promoted no version after the first" in problem and "the suite fell by 100.0 points" in problem

    run.registry.set_state(2, VersionState.PROMOTED)
    assert promoted_result(run.registry, run.folder).number == 2
    adapter = {f"base_model.model.q.lora_{part}.weight": torch.full((2, 2), value) for part, value in (("A", 1.0), ("B", 0.0))}
    save_file(adapter, tmp_path / "versions/000002" / ADAPTER)
    assert promoted_result(run.registry, run.folder) is None, "with adapters, a rollback to version 0 has its own hash"
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_old_rollbacks_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_ROLLBACKS", 1)
    run = await opened(tmp_path)
    old = GateVerdict(version=5, sha256="0" * 64, outcome=GateOutcome.ROLLED_BACK, reason="worse", at="now", reference=0)
    evaluation_folder(tmp_path, 5).mkdir(parents=True)
    (evaluation_folder(tmp_path, 5) / "verdict.json").write_bytes(codec.to_json(old))
    worse, decided = RuleResult(enough=True, blocked=True, cases=9, unscored=0), Gate.of(run)
    assert decided is not None
    outcomes = [decided._outcome(worse, number)[0] for number in (4, 6, 4 + BUDGET_STEPS, 5 + BUDGET_STEPS)]
    assert outcomes == [GateOutcome.ROLLED_BACK, GateOutcome.BLOCKED, GateOutcome.BLOCKED, GateOutcome.ROLLED_BACK]
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_rollbacks_end_at_their_limit_and_other_weights_are_evaluated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_ROLLBACKS", 1)
    run = await opened(tmp_path)
    run.recipe = RECIPE.but({"gate.every": 1, "steps": 9})
    await looked(run)
    publish(run, 1, 0, "bad c01")
    await served_through(run, 1)
    learner_answers(run, 2)
    publish(run, 3, 2, "bad c02")
    await served_through(run, 3)
    blocked = read_verdict(tmp_path, 3)
    assert (
        blocked is not None
        and blocked.outcome is GateOutcome.BLOCKED
        and "after 1 rollbacks within 256 versions the gate only blocks" in blocked.reason
    )
    run.registry.reconcile(2)
    await run.served.fall_back(run.registry.get(2))
    publish(run, 3, 2, "good 3")
    await served_through(run, 3)
    again = read_verdict(tmp_path, 3)
    assert again is not None and again.outcome is GateOutcome.PROMOTED and again.sha256 != blocked.sha256
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_no_rollback_is_requested_after_the_last_version(tmp_path: Path) -> None:
    """It has ended: the request would remain until the run got more steps, and then roll back later promotions."""
    run = await opened(tmp_path)
    run.recipe = RECIPE.but({"steps": 3})
    for number, weights in enumerate(("good 1", "bad c03", "good 3"), 1):
        publish(run, number, number - 1, weights)
    await served_through(run, 3)
    assert [(one.version, one.outcome) for one in read_verdicts(tmp_path)] == [
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
    run = await opened(tmp_path)
    run.recipe = RECIPE.but({"steps": 3})
    publish(run, 1, 0, "good 1")
    publish(run, 2, 1, "bad c03")
    await served_through(run, 2)
    assert rollback.pending_request(tmp_path / "versions", run.registry) is not None
    publish(run, 3, 2, "good 3")
    await served_through(run, 3)
    assert [(one.version, one.outcome) for one in read_verdicts(tmp_path)][1:] == [(2, GateOutcome.ROLLED_BACK), (3, GateOutcome.PROMOTED)]
    assert rollback.pending_request(tmp_path / "versions", run.registry) is None
    await plain.close(run)


@pytest.mark.usefixtures("scripted")
async def test_attempts_of_another_version_are_unscored_and_too_few_scores_give_no_verdict(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    await looked(run)
    publish(run, 1, 0, "good 1")
    publish(run, 2, 1, "good 2")
    run.progress.stop_at = 2

    def late(said: Callable[[int, str], str]) -> Callable[[int, str], str]:
        def say(turn: int, episode: str) -> str:
            text = said(turn, episode)
            run.player.version = 1 if episode.startswith("gate000002") else run.player.version
            return text

        return say

    run.player.script = late(run.player.say)
    await served_through(run, 2)
    found = read_verdict(tmp_path, 2)
    assert found is not None and found.outcome is GateOutcome.UNJUDGED and "only 0 cases" in found.reason
    assert run.registry.get(2).state is VersionState.SERVING and rollback.pending_request(tmp_path / "versions", run.registry) is None
    first = json.loads((tmp_path / "gate/000002/attempts.jsonl").read_text().splitlines()[0])
    assert first["score"] is None and "version 1 sampled some of it" in first["reason"]
    await plain.close(run)


def test_the_first_different_turn_of_two_episodes() -> None:
    def words(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"messages": [{"role": "assistant", "content": said, "tool_calls": [{"name": call}]} for said, call in turns]}

    one = words(("a", "python"), ("b", "submit"))
    assert first_different_turn(one, one) is None
    assert first_different_turn(one, words(("other words", "python"), ("b", "python"))) == 2, "other calls count before other text"
    assert first_different_turn(one, words(("other words", "python"), ("b", "submit"))) == 1
    assert (
        first_different_turn(one, words(("a", "python"))) == first_different_turn(words(("a", "python")), one) == 2
        and first_different_turn({}, {}) is None
    )


def test_a_rollback_request_is_void_once_its_version_has_other_weights(tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path)
    for number in range(3):
        plain.publish(registry, number, number - 1 if number else None, b"%d" % number)
    made = registry.get(2)
    assert made is not None and rollback.pending_request(tmp_path, registry) is None
    rollback.request_rollback(tmp_path, rollback.RollbackRequest(version=2, sha256=made.sha256, to=0, to_sha256="x", reason="\ud800"))
    assert (found := rollback.pending_request(tmp_path, registry)) is not None and found.reason == "\N{REPLACEMENT CHARACTER}"
    registry.reconcile(1)
    assert rollback.pending_request(tmp_path, registry) is None
    plain.publish(registry, 2, 1, b"other")
    assert rollback.pending_request(tmp_path, registry) is None
    with pytest.raises(ValueError, match="is not older"):
        rollback.RollbackRequest(version=2, sha256="", to=2, to_sha256="", reason="")

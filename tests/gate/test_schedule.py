"""The gate on its own server: versions are served while one is evaluated.

The policy is scripted as in gated_run.py, and a version's weights determine which cases it passes. The gate's server is
a double whose attempts can be blocked; the real one is tested in tests/gate/test_server.py and tests/e2e/test_lora.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.errors import ServingError, SwapError
from agentrl.gate.gate import Gate
from agentrl.gate.verdict import GateOutcome, read_verdict, read_verdicts
from agentrl.records import PolicyVersion, VersionState
from agentrl.run import loop
from agentrl.version import rollback
from tests.gate import test_rolled_back as plain
from tests.gate.gated_run import RECIPE, Player, answer_as_learner, open_run, publish, states
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("scripted")
scripted = plain.scripted
OWN_SERVER = RECIPE.but({"gate.server": "own"})


class HeldPolicy(Player):
    """Answers for the version that the test double serves, unless it is blocked."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        while self.run.served.version in self.run.held_up:
            await asyncio.sleep(0.01)
        return await super().generate(*arguments, **options)


class ScriptedGateServer:
    """Stands in for the gate's server and records the versions that it evaluates."""

    def __init__(self, run: Any) -> None:
        self.evaluated: list[int] = []
        self.error_for: Callable[[PolicyVersion], Exception | None] = lambda version: None
        served = SimpleNamespace(version=0)
        self.run = run
        self.policy = HeldPolicy(SimpleNamespace(served=served, folder=run.folder, held_up=run.held_up))

    async def serve(self, version: PolicyVersion) -> None:
        if (error := self.error_for(version)) is not None:
            raise error
        self.evaluated.append(version.number)
        self.policy.run.served.version = version.number


async def run_with_gate_server(run_dir: Path) -> Any:
    run = await open_run(run_dir)
    run.recipe, run.held_up = OWN_SERVER, set()
    run.gate_server = ScriptedGateServer(run)
    return run


async def serve_through(run: Any, last: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    """Serves the versions up to `last`, and runs `meanwhile` at the same time."""
    run.progress.stop_at = last
    async with asyncio.timeout(60), asyncio.TaskGroup() as parts:
        swaps = parts.create_task(loop._swap_versions(run))
        if meanwhile is not None:
            await meanwhile()
        await swaps


@pytest.mark.slow
async def test_versions_are_served_during_an_evaluation_up_to_the_next_due_one(tmp_path: Path) -> None:
    run = await run_with_gate_server(tmp_path)
    for number in range(1, 6):
        publish(run, number, number - 1, f"good {number}")
    served: list[int] = []

    run.held_up.add(0)

    async def check_while_evaluating() -> None:
        await until(lambda: run.served.version == 2)
        await asyncio.sleep(0.2)
        served.append(run.served.version)
        assert read_verdicts(tmp_path) == () and run.gate_server.evaluated == [0]
        assert "gate" not in "".join(run.tracker.alerts)
        run.held_up.clear()

    await serve_through(run, 5, check_while_evaluating)
    assert served == [2], "version 2 is served while version 0 is evaluated; version 3 waits for its evaluation"
    assert run.gate_server.evaluated == [0, 2, 4]
    assert [(verdict.version, verdict.outcome) for verdict in read_verdicts(tmp_path)] == [
        (0, GateOutcome.REFERENCE),
        (2, GateOutcome.PROMOTED),
        (4, GateOutcome.PROMOTED),
    ]
    assert states(run) == ["promoted", "served", "promoted", "served", "promoted", "serving"]
    assert run.player.turn_count == 0, "the policy's own server got no request"
    await plain.close(run)


@pytest.mark.slow
async def test_a_version_rejected_after_newer_ones_serve_is_rolled_back_with_them(tmp_path: Path) -> None:
    run = await run_with_gate_server(tmp_path)
    for number, weights in enumerate(("good 1", "bad c03", "bad c03 c07"), 1):
        publish(run, number, number - 1, weights)
    run.registry.hold = lambda number, hold=run.registry.hold: (hold(number), held_versions.append(number))
    held_versions: list[int] = []

    async def learn() -> None:
        await until(lambda: rollback.pending_request(tmp_path / "versions", run.registry) is not None and run.served.version == 3)
        request = answer_as_learner(run, 4)
        assert (request.version, request.to) == (2, 0)
        publish(run, 5, 4, "good 5")
        publish(run, 6, 5, "good 6")

    await serve_through(run, 6, learn)
    assert states(run) == ["promoted", "rolled_back", "rolled_back", "rolled_back", "promoted", "served", "promoted"]
    assert [(verdict.version, verdict.outcome) for verdict in read_verdicts(tmp_path)] == [
        (0, GateOutcome.REFERENCE),
        (2, GateOutcome.ROLLED_BACK),
        (4, GateOutcome.PROMOTED),
        (6, GateOutcome.PROMOTED),
    ]
    assert Gate.of(run).is_concluded() and held_versions == [0, 2, 4, 6]
    await plain.close(run)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4])
async def test_an_interrupted_run_abandons_the_evaluation_and_the_resumed_one_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Version 4 waits for the evaluation of version 2; an interrupt ends that wait too."""
    run, weights = await run_with_gate_server(tmp_path), ("good 1", "good 2", "good 3", "bad c03 c07")
    for number in range(1, stop + 1):
        publish(run, number, number - 1, weights[number - 1])

    run.held_up.add(2)

    def interrupt_before_applying(gate: Gate, version: PolicyVersion, verdict: object) -> None:
        """Interrupts before the verdict on version 2 is applied."""
        run.progress.interrupted = version.number == 2

    async def interrupt() -> None:
        await until(lambda: run.gate_server.evaluated == [0, 2] and run.served.version == stop)
        run.progress.interrupted, run.progress.stop_at = True, stop

    await serve_through(run, 5, interrupt)
    assert read_verdict(tmp_path, 2) is None and run.served.version == stop

    run.progress.interrupted = False
    run.held_up = {4}
    run.gate_server.policy.run.held_up = run.held_up
    with monkeypatch.context() as patch:
        patch.setattr("agentrl.gate.gate.Gate._apply", interrupt_before_applying)
        await serve_through(run, stop)
    assert [verdict.version for verdict in read_verdicts(tmp_path)] == [0, 2] and states(run)[2] == "served"
    run.progress.interrupted = False
    run.held_up.clear()
    if stop == 3:
        publish(run, 4, 3, weights[3])
    await serve_through(run, 4)
    assert states(run)[2] == "promoted"
    verdict = read_verdict(tmp_path, 4)
    assert verdict is not None and verdict.outcome is GateOutcome.ROLLED_BACK and verdict.reference == 2
    await plain.close(run)


@pytest.mark.slow
async def test_an_interrupt_ends_the_wait_for_the_last_evaluation(tmp_path: Path) -> None:
    run = await run_with_gate_server(tmp_path)
    run.recipe = OWN_SERVER.but({"steps": 1})
    publish(run, 1, 0, "good 1")
    run.held_up.add(1)

    async def interrupt() -> None:
        await until(lambda: run.gate_server.evaluated == [0, 1])
        await asyncio.sleep(0.1)
        run.progress.interrupted = True

    await serve_through(run, 1, interrupt)
    assert read_verdict(tmp_path, 1) is None and not Gate.of(run).is_concluded()
    run.progress.interrupted = False
    run.held_up.clear()
    await serve_through(run, 1)
    assert Gate.of(run).is_concluded()
    await plain.close(run)


@pytest.mark.slow
async def test_versions_left_without_a_verdict_are_evaluated_in_order_if_their_weights_exist(tmp_path: Path) -> None:
    run = await run_with_gate_server(tmp_path)
    run.recipe = OWN_SERVER.but({"gate.every": 1})
    for number in range(1, 4):
        publish(run, number, number - 1, f"good {number}")
        await run.served.swap(run.registry.get(number))
    (tmp_path / "versions/000001/model.safetensors").unlink()
    await serve_through(run, 3)
    assert run.gate_server.evaluated == [0, 2, 3]
    assert [verdict.version for verdict in read_verdicts(tmp_path)] == [0, 2, 3]
    assert any(alert.startswith("version 1 is not evaluated: ") and "No such file" in alert for alert in run.tracker.alerts)
    await plain.close(run)


@pytest.mark.parametrize("error", [SwapError("the probe disagrees"), ServingError("it died 6 times")])
async def test_a_gate_that_fails_ends_the_run(tmp_path: Path, error: Exception) -> None:
    run = await run_with_gate_server(tmp_path)
    run.gate_server.error_for = lambda version: error
    with pytest.RaisesGroup(pytest.RaisesExc(type(error), match=str(error)), flatten_subgroups=True):
        await serve_through(run, 6)
    await plain.close(run)


@pytest.mark.slow
async def test_a_version_retracted_during_its_evaluation_is_evaluated_with_its_new_weights(tmp_path: Path) -> None:
    run = await run_with_gate_server(tmp_path)
    for number, weights in enumerate(("good 1", "awful", "good 3"), 1):
        publish(run, number, number - 1, weights)

    run.held_up.add(2)

    async def retract() -> None:
        await until(lambda: run.gate_server.evaluated == [0, 2] and run.served.version == 3)
        run.registry.reconcile(1)  # the learner returned to an older checkpoint
        await until(lambda: run.served.version == 1)
        publish(run, 2, 1, "good 2")
        run.held_up.clear()
        await until(lambda: run.served.version == 2)
        publish(run, 3, 2, "good 3 again")
        publish(run, 4, 3, "good 4")

    await serve_through(run, 4, retract)
    assert run.gate_server.evaluated == [0, 2, 2, 4]
    verdict = read_verdict(tmp_path, 2)
    assert verdict is not None and verdict.outcome is GateOutcome.PROMOTED and verdict.sha256 == run.registry.get(2).sha256
    assert run.registry.get(2).state is VersionState.PROMOTED
    await plain.close(run)


@pytest.mark.slow
async def test_a_version_rolled_back_by_the_learners_limit_is_not_evaluated(tmp_path: Path) -> None:
    run = await run_with_gate_server(tmp_path)
    for number, parent, weights in ((1, 0, "good 1"), (2, 1, "awful"), (3, 1, "good 1"), (4, 3, "good 4")):
        publish(run, number, parent, weights)
    run.registry.set_state(2, VersionState.ROLLED_BACK)
    run.gate_server.error_for = lambda version: SwapError("not finite") if version.number == 2 else None
    await serve_through(run, 4)
    assert run.gate_server.evaluated == [0, 4]
    assert [verdict.version for verdict in read_verdicts(tmp_path)] == [0, 4]
    await plain.close(run)


@pytest.mark.slow
async def test_a_version_about_to_be_rolled_back_is_not_evaluated(tmp_path: Path) -> None:
    run = await run_with_gate_server(tmp_path)
    for number, weights in enumerate(("good 1", "bad c03", "bad c03", "awful"), 1):
        publish(run, number, number - 1, weights)
    run.gate_server.error_for = lambda version: SwapError("not finite") if version.number == 4 else None

    async def learn() -> None:
        await until(lambda: rollback.pending_request(tmp_path / "versions", run.registry) is not None and run.served.version == 4)
        await asyncio.sleep(0.2)
        answer_as_learner(run, 5)
        publish(run, 6, 5, "good 6")

    await serve_through(run, 6, learn)
    assert run.gate_server.evaluated == [0, 2, 6]
    assert [verdict.version for verdict in read_verdicts(tmp_path)] == [0, 2, 6]
    await plain.close(run)


@pytest.mark.slow
async def test_a_version_retracted_before_its_evaluation_is_evaluated_when_it_serves_again(tmp_path: Path) -> None:
    """The learner repeats a step with the same groups, and may get the same weights."""
    run = await run_with_gate_server(tmp_path)
    for number in range(1, 5):
        publish(run, number, number - 1, f"good {number}")

    run.held_up.add(2)

    async def retract() -> None:
        await until(lambda: run.gate_server.evaluated == [0, 2] and run.served.version == 4)
        await asyncio.sleep(0.2)  # version 4 waits for the evaluation of version 2
        run.registry.reconcile(3)
        run.held_up.clear()
        await until(lambda: run.served.version == 3)
        await asyncio.sleep(1.0)  # version 4 is next, and there is nothing to evaluate
        publish(run, 4, 3, "good 4")
        await until(lambda: run.served.version == 4)
        publish(run, 5, 4, "good 5")

    await serve_through(run, 5, retract)
    assert [(verdict.version, verdict.outcome) for verdict in read_verdicts(tmp_path)] == [
        (0, GateOutcome.REFERENCE),
        (2, GateOutcome.PROMOTED),
        (4, GateOutcome.PROMOTED),
    ]
    assert not any("is not judged" in alert or "is not evaluated" in alert for alert in run.tracker.alerts)
    await plain.close(run)

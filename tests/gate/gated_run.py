"""A run with a gate: server, channel and policy are scripted, and a version's weights determine which cases it passes.

Registry, store, suite, episodes, verifier, rule, tracker and the loop's code are real.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.agent import TurnLoop
from agentrl.config.gate import GateConfig
from agentrl.failure.case import Case, Suite
from agentrl.gate.gate import Gate
from agentrl.gate.schedule import schedule_gate
from agentrl.records import Episode, Message, SandboxSpec, Score, Split, Task, VersionState
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.run import loop
from agentrl.session.opening import Progress
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from agentrl.version import rollback
from tests.chats import chat_of, shared_tokenizer
from tests.gate import test_rolled_back as plain

RECIPE = plain.RECIPE.but(gate=GateConfig(suite="evals/x", every=2, repeats=4), steps=6)
scripted = plain.scripted
CASES = 12


async def score_answer(task: Task, episode: Episode) -> Score:
    return Score(value=float(episode.answer == "pass"))


def make_suite() -> Suite:
    def task(name: str) -> Task:
        return Task(
            id=name,
            family="f",
            prompt=(Message(role="user", content=f"case {name}"),),
            tools=("submit",),
            sandbox=SandboxSpec(image="none"),
            verifiers=("tests.gate.gated_run:score_answer",),
            data={},
            split=Split.HELDOUT,
        )

    names = [f"c{number:02d}" for number in range(CASES)]
    return Suite(folder=Path("x"), name="x", cases=tuple(Case(id=name, task=task(name)) for name in names))


class Killed(BaseException):
    """Raised where the driver dies."""


class Player(ScriptedPolicy):
    """Submits the answers in the served version's weights.

    `good` passes every case. `bad c03 c07-r1` fails all attempts at c03 and attempt 1 at c07. `awful` fails everything.
    """

    cache_use = None

    def __init__(self, run: Any) -> None:
        super().__init__(shared_tokenizer(), self.say)
        self.run, self.turn_count = run, 0

    def episode(self, episode_id: str, task_key: str) -> Any:
        return nullcontext()

    def say(self, turn: int, episode: str) -> str:
        self.turn_count += 1
        self.version = self.run.served.version
        weights = (self.run.folder / f"versions/{self.version:06d}/model.safetensors").read_text().split()
        case, attempt = episode.split("-")[1:3]
        failed = not {case, f"{case}-{attempt}"}.isdisjoint(weights[1:]) or weights == ["awful"]
        return f"<tool_call>\n{json.dumps({'name': 'submit', 'arguments': {'answer': 'fail' if failed else 'pass'}})}\n</tool_call>"


async def open_run(run_dir: Path) -> Any:
    """Returns a run at version 0, which passes every case."""
    run = await plain.open_run(run_dir)
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


def answer_as_learner(run: Any, number: int) -> rollback.RollbackRequest:
    """Does what the learner does in step `number - 1`; tests/learner/test_gate.py tests the real one."""
    request = rollback.pending_request(run.folder / "versions", run.registry)
    assert request is not None
    weights = (run.folder / f"versions/{request.to:06d}/model.safetensors").read_text()
    publish(run, number, request.to, weights)
    for rejected in range(request.to + 1, number):
        run.registry.set_state(rejected, VersionState.ROLLED_BACK)
    return request


async def evaluate_due(run: Any) -> None:
    async with schedule_gate(Gate.of(run), run.progress) as gate:
        await gate.evaluate_due()


async def serve_version_2(run: Any, first_weights: str, second_weights: str) -> None:
    """Evaluates version 0, publishes versions 1 and 2 with these weights, and serves version 2, which is due. Version 1 has no verdict."""
    await evaluate_due(run)
    publish(run, 1, 0, first_weights)
    publish(run, 2, 1, second_weights)
    run.registry.set_state(1, VersionState.SERVING)
    await run.served.swap(run.registry.get(2))


async def serve_through(run: Any, last: int) -> None:
    run.progress.stop_at = last
    async with asyncio.timeout(60):
        await loop._swap_versions(run)


def states(run: Any) -> list[str]:
    return [str(version.state) for version in run.registry.versions()]

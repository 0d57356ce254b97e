"""The agent of hosts: the result of a host becomes the score or the reason why there is none."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.config.recipe import HOSTED_AGENT
from agentrl.environment import inspect_tasks, open_environment, venvs
from agentrl.environment.host import INSIDE, HostSpec
from agentrl.environment.hosted import MAX_ANSWER, HostedAgent, host_of, score_of
from agentrl.errors import PluginError, ServingError
from agentrl.gateway import posted_reward
from agentrl.plugins import references
from agentrl.plugins.parts import ENVIRONMENTS, EnvironmentKind
from agentrl.plugins.references import resolve
from agentrl.records import Blame, EnvironmentSpec, Episode, Limits, SandboxSpec, Score, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of, shared_tokenizer
from tests.episodes import make_runner, task, tokenizer

__all__ = ["make_runner", "task", "tokenizer"]

SCRIPT = f"""
import asyncio, json, sys, urllib.request
sys.path.insert(0, {str(INSIDE)!r})
from host_channel import Fault, main

def ask(params):
    body = json.dumps({{"model": params["model"], "messages": [{{"role": "user", "content": "How many?"}}]}}).encode()
    headers = {{"Authorization": "Bearer " + params["key"], "Content-Type": "application/json"}}
    with urllib.request.urlopen(urllib.request.Request(params["base_url"] + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

async def play(params, caller):
    for _ in range(params["data"].get("turns", 1)):
        answer = await asyncio.to_thread(ask, params)
    if params["data"].get("hangs"):
        await asyncio.sleep(3600)
    return params["data"]["result"] if "result" in params["data"] else {{"value": 0.25, "answer": answer}}

async def serve(channel, config):
    await asyncio.Event().wait()

main(None, serve, play)
"""


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "script.py").write_text(SCRIPT)
    spec = HostSpec(name="fake", python=sys.executable, script=str(tmp_path / "script.py"), config={}, folder=tmp_path)
    kind = EnvironmentKind(family="tests.environment.test_hosted:Family", host="tests.environment.test_hosted:spec_of")
    monkeypatch.setitem(ENVIRONMENTS, "fake", kind)
    SPECS.append(spec)
    yield
    SPECS.clear()


SPECS: list[HostSpec] = []


def spec_of(spec: EnvironmentSpec) -> HostSpec:
    return SPECS[0]


async def play(task: Task, *, agent: HostedAgent | None = None, script: Any = lambda turn, name: "3", **data: Any) -> tuple[Episode, Score]:
    spec = EnvironmentSpec(ref="fake:x")
    task = replace(
        task, tools=(), data=data, environment=spec, limits=Limits(turns=2, episode_tokens=2000, wall_s=data.pop("wall_s", 30.0))
    )
    runner = EpisodeRunner(
        agent=agent or HostedAgent(chat=chat_of(shared_tokenizer())),
        policy=ScriptedPolicy(shared_tokenizer(), script),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=2000,
        request_timeout_s=30.0,
    )
    episode = await runner.run(task, episode_id=f"{task.id}-{len(str(data))}-{id(data)}")
    score = await posted_reward(task, episode)
    if agent is None:
        await host_of(spec).close()
    return episode, score


@pytest.mark.slow
async def test_the_hosts_value_is_the_score(task: Task) -> None:
    episode, score = await play(task)
    assert (score.value, episode.answer, episode.trajectories[0].stop_reason, episode.failures) == (0.25, "3", "answered", ())
    result = {"value": 1, "parts": {"a": 0.5}, "evidence": "why", "stop": "won", "answer": "x" * 2 * MAX_ANSWER}
    episode, score = await play(task, result=result)
    assert (score.value, score.parts, score.evidence) == (1.0, {"a": 0.5}, "why")
    assert episode.trajectories[0].stop_reason == "won" and episode.answer == "x" * MAX_ANSWER


@pytest.mark.parametrize(
    "result",
    [
        *({}, {"value": "1"}, {"value": True}, {"value": 1e301}, {"value": 10**400}, {"value": math.nan}),
        *({"value": 1, "parts": [1]}, {"value": 1, "parts": {"a": None}}, {"value": 1, "parts": {"a": -(10**400)}}),
    ],
)
def test_an_invalid_result_gives_no_score(result: dict[str, Any]) -> None:
    score = score_of(result)
    assert score.value is None and score.reason and score.blame in (None, Blame.INFRASTRUCTURE)


def test_the_hosts_drop_numbers_that_no_float_can_represent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(INSIDE))
    data, samples = import_module("verifiers_data"), import_module("inspect_samples")
    assert data.finite({"huge": 10**400, "infinite": math.inf, "nan": math.nan, "one": 1}) == {"one": 1.0}
    result = samples.score_result({"scorer": SimpleNamespace(value=10**400, reason="", explanation="")}, "", {})
    assert result["value"] is None and "is not a number" in result["reason"]


def test_parts_and_texts_are_bounded() -> None:
    assert score_of({"value": 1, "parts": {str(number): 1 for number in range(65)}}).value is None
    score = score_of({"reason": "r" * 10_000, "evidence": "e" * 100_000, "blame": "task"})
    assert (len(score.reason), len(score.evidence), score.blame) == (2000, 10_000, Blame.TASK)
    assert score_of({"reason": "r", "blame": "policy"}).blame is None


@pytest.mark.parametrize("result", [[1], "text", 3])
async def test_a_result_that_is_not_an_object_is_an_infrastructure_fault(task: Task, result: Any) -> None:
    episode, score = await play(task, result=result)
    assert [failure.blame for failure in episode.failures] == [Blame.INFRASTRUCTURE] and score.value is None


async def test_a_fault_of_the_program_is_excluded_and_its_score_counts_only_if_the_policy_provoked_it(task: Task) -> None:
    """`GroupRunner` scores such an episode if only its text provokes the fault."""
    agent = HostedAgent(chat=chat_of(shared_tokenizer()))
    fault = {"blame": "infrastructure", "message": "it broke"}
    episode, score = await play(task, agent=agent, result={"value": 0.5, "fault": fault})
    assert episode.left_out and score.value == 0.5
    await play(task, agent=agent, result={"value": -2.0})
    episode, score = await play(task, agent=agent, result={"value": None, "reason": "r", "fault": fault})
    assert episode.left_out and score.value == -2.0 and "it broke" in score.evidence
    for blame in ("task", "policy"):
        episode, _ = await play(task, agent=agent, result={"fault": {"blame": blame, "message": "m"}})
        assert [failure.blame.value for failure in episode.failures] == [blame]
    await host_of(EnvironmentSpec(ref="fake:x")).close()


async def test_a_failing_server_ends_the_episode_at_once(task: Task) -> None:
    def failing_script(turn: int, name: str) -> str:
        raise ServingError("gone")

    async with asyncio.timeout(20):
        episode, score = await play(task, script=failing_script, hangs=True)
    assert [failure.kind for failure in episode.failures] == ["ServingError"] and score.value is None


async def test_a_host_that_hangs_is_not_blamed_on_the_policy(task: Task) -> None:
    episode, score = await play(task, hangs=True, wall_s=1.5)
    assert [(failure.blame, episode.trajectories[0].stop_reason) for failure in episode.failures] == [(Blame.INFRASTRUCTURE, "wall_limit")]
    assert score.value is None


async def test_more_requests_than_turns_are_rejected(task: Task) -> None:
    episode, _ = await play(task, turns=3)
    assert sum(len(each.turns) for each in episode.trajectories) == 2 and any("403" in failure.message for failure in episode.failures)


@pytest.mark.parametrize("prefix", ["inspect", "verifiers"])
def test_a_host_runs_in_the_recipes_project_folder(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    lock = venvs.Lock(name="mine", requires=("inspect-ai", "verifiers"), python="3.11", platform="x", pins=())
    for path, text in (("environments/mine.lock", lock.to_text()), (".environments/mine/agentrl.lock", lock.to_text())):
        (project / path).parent.mkdir(parents=True)
        (project / path).write_text(text)
    python = venvs.python_of(project / ".environments/mine")
    python.parent.mkdir()
    python.touch()
    (project / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(references, "_added", [])
    monkeypatch.setattr(sys, "path", sys.path[:])
    references.add_project_root(Path("project"))
    options = {"wall_s": 1.0, "environment": "mine"}
    spec = resolve(ENVIRONMENTS[prefix].host)(EnvironmentSpec(ref=f"{prefix}:mine.py", options=options))
    assert (spec.folder, spec.python) == (project, str(python))


async def test_the_table_of_environments_has_the_hosts() -> None:
    recipe = Recipe(name="r", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="fake:x"))
    assert recipe.agent.ref == HOSTED_AGENT
    assert recipe.but({"tasks.family": {"ref": "fake:x", "options": {"solver": "agentrl"}}}).agent.ref == "turns"
    with pytest.raises(PluginError, match="'fake:x' drives the model, so the turn loop cannot play it"):
        await open_environment(EnvironmentSpec(ref="fake:x"))


class SlowSandboxes(ScriptedSandboxes):
    """A backend that takes a moment to open a sandbox."""

    async def open(self, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0.01)
        return await super().open(*arguments, **options)


class ScoringHost:
    """A host whose scorer sends two concurrent requests."""

    async def call(self, method: str, params: Any, *, timeout_s: float, serve: Any) -> Any:
        request = {"argv": ["true"], "stdin": "", "timeout_s": 1.0, "output_bytes": 100}
        results = await asyncio.gather(*(serve("exec", request) for _ in range(2)))
        return {"value": len(results)}


async def test_concurrent_requests_of_a_scorer_share_one_sandbox(task: Task, tokenizer: Any, make_runner: Any, monkeypatch: Any) -> None:
    episode = await make_runner(ScriptedPolicy.saying(tokenizer, "1")).run(task, episode_id="e")
    monkeypatch.setattr(inspect_tasks, "host_of", lambda spec: ScoringHost())
    scored = replace(task, data={"inspect": {"ref": "inspect:x"}}, sandbox=SandboxSpec(image="none"))
    sandboxes = SlowSandboxes(printing(""))
    assert (await inspect_tasks.score_ended(scored, episode, sandboxes)).value == 2.0
    assert [sandbox.closed for sandbox in sandboxes.opened] == [True]

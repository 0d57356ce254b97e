"""Complete episodes in remote environments, played by the turn loop with a scripted policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection

from agentrl.config.recipe import TasksConfig
from agentrl.environment import close_environments, episode_return
from agentrl.plugins.parts import Part
from agentrl.records import Blame, Split
from agentrl.task import open_family
from tests.environment.scenarios import counter_row
from tests.environment.test_nemo_gym import NemoGym
from tests.environment.test_playing import play
from tests.environment.web_servers import fake_openenv, http_server, observation
from tests.episodes import tokenizer as tokenizer


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


def tasks(ref: str, **options: Any) -> Any:
    return open_family(TasksConfig(family=Part(ref, options)), seed=0)


async def test_choices_of_an_openenv_server(tokenizer: Any) -> None:
    async def step(socket: ServerConnection, data: Any) -> None:
        await socket.send(json.dumps(observation(f"went {data['move']}", reward=0.5, done=data["move"] == "right")))

    async with fake_openenv(on_step=step) as fake:
        task = tasks(fake.ref).task(Split.TRAIN, 0)
        episode, policy = await play(task, tokenizer, "left", "right")
        await close_environments()
        assert fake.open == 0
    (trajectory,) = episode.trajectories
    assert trajectory.stop_reason == "terminated" and not episode.failures
    assert "system\nA test.<|im_end|>\n<|im_start|>user\nyou are here" in tokenizer.decode(policy.prompts[0])
    assert (await episode_return(task, episode)).value == 1.0


async def test_a_fault_of_a_server_excludes_the_episode(tokenizer: Any) -> None:
    async def step(socket: ServerConnection, data: Any) -> None:
        socket.transport.abort()

    async with fake_openenv(on_step=step) as fake:
        episode, _ = await play(tasks(fake.ref).task(Split.TRAIN, 0), tokenizer, "left")
    (failure,) = episode.failures
    assert (failure.blame, failure.kind, failure.stage) == (Blame.INFRASTRUCTURE, "EnvironmentFault", "environment")
    assert "ended the session" in failure.message


async def test_an_answer_after_calls_is_verified_by_a_nemo_gym_server(tokenizer: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(counter_row(6)) + "\n")
    verify = {"reward": 0.75, "reward_components": {"count": 0.75}}
    async with http_server(NemoGym(verify)) as url:
        task = await asyncio.to_thread(tasks(f"nemo-gym:{url}", tasks=str(rows)).task, Split.TRAIN, 0)
        called = '<tool_call>\n{"name": "get_counter_value", "arguments": {}}\n</tool_call>'
        episode, policy = await play(task, tokenizer, called, "It is 6.")
    (trajectory,) = episode.trajectories
    assert not episode.failures and trajectory.stop_reason == "terminated"
    assert tokenizer.decode(policy.prompts[0]).count("add 1 then add 2 then get the count<|im_end|>") == 1
    score = await episode_return(task, episode)
    assert score.value == 0.75 and score.parts == {"count": 0.75}

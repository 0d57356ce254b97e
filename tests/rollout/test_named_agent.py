"""User-supplied agents: the documented one runs in an episode, and invalid ones fail."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import ChatFormat
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import PluginError
from agentrl.plugins import parts
from agentrl.protocols import Agent, LiveEpisode
from agentrl.records import Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.session.preflight import check_parts
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing

ROOT = Path(__file__).resolve().parents[2]
BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


async def test_a_user_supplied_agent_runs_the_episodes(task: Task, tokenizer: Any, tmp_path: Path) -> None:
    """Runs the documented agent: one turn without tools."""
    (code,) = re.findall(r"```python\n(# parts/agent\.py\n.*?)^```", (ROOT / "docs" / "parts.md").read_text(), re.MULTILINE | re.DOTALL)
    policy = ScriptedPolicy.saying(tokenizer, "3")
    (tmp_path / "agent.py").write_text(code)
    recipe = BASE.but({"rollout.agent": f"{tmp_path}/agent.py:OneAnswer"})
    check_parts(recipe)
    agent = parts.make_part(parts.AGENT, recipe.rollout.agent, chat=ChatFormat(tokenizer))
    runner = EpisodeRunner(
        agent=agent,
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("3")),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )
    episode = await runner.run(task, episode_id="e")
    assert (episode.answer, episode.trajectories[0].stop_reason, len(policy.prompts)) == ("3", "answered", 1)
    prompt = tokenizer.decode(policy.prompts[0])
    assert "submit" not in prompt and "How many?" in prompt


def test_an_invalid_agent_fails_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("class Part:\n    def __init__(self, *, chat): ...\n    def act(self, episode): ...\n")
    with pytest.raises(PluginError, match=r"rollout\.agent .* act is not async, but will be awaited"):
        check_parts(BASE.but({"rollout.agent": f"{tmp_path}/agent.py:Part"}))


class Stubborn:
    """Continues after any exception, like a bare `except:` in a loop."""

    def __init__(self) -> None:
        self.over = False

    async def act(self, episode: LiveEpisode) -> str:
        began = time.monotonic()
        while time.monotonic() - began < 10.0:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.05)
        self.over = True
        return "answered"


class Leaving:
    async def act(self, episode: LiveEpisode) -> str:
        async def leave() -> None:
            raise SystemExit(3)

        await asyncio.create_task(leave())
        return "answered"


class Closing:
    async def act(self, episode: LiveEpisode) -> str:
        raise GeneratorExit


@pytest.mark.filterwarnings("ignore:Exception ignored in. <coroutine object Stubborn.act")  # it also ignores `close`
@pytest.mark.parametrize(("agent", "kind"), [(Stubborn(), "wall_limit"), (Leaving(), "CodeExited"), (Closing(), "RuntimeError")])
async def test_an_agent_cannot_prevent_the_end_of_its_episode(agent: Agent, kind: str, task: Task, tokenizer: Any) -> None:
    runner = EpisodeRunner(
        agent=agent,
        policy=ScriptedPolicy.saying(tokenizer, "3"),
        sandboxes=ScriptedSandboxes(printing("3")),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )
    short = replace(task, limits=replace(task.limits, wall_s=0.2, tool_timeout_s=0.1))
    episode = await runner.run(short, episode_id="e")
    assert [failure.kind for failure in episode.failures] == [kind]
    assert not getattr(agent, "over", False), "it was awaited to the end"

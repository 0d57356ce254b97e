"""Somebody's agent, named in a recipe: what the docs show acts in an episode, and what cannot act is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl import parts
from agentrl.agent import ChatFormat
from agentrl.errors import PluginError
from agentrl.recipe import PolicyConfig, Recipe, TasksConfig
from agentrl.records import Task
from agentrl.rollout import EpisodeRunner
from agentrl.run.preflight import check_parts
from agentrl.sampling import Sampling
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing

ROOT = Path(__file__).resolve().parents[2]
BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


async def test_an_agent_of_somebodys_acts_in_the_episodes_of_a_run(task: Task, tokenizer: Any, tmp_path: Path) -> None:
    """The one of the docs: it asks once, and shows the model no tools."""
    (code,) = re.findall(r"```python\n(# parts/agent\.py\n.*?)^```", (ROOT / "docs" / "parts.md").read_text(), re.MULTILINE | re.DOTALL)
    policy = ScriptedPolicy.saying(tokenizer, "3")
    (tmp_path / "agent.py").write_text(code)
    made = BASE.but({"rollout.agent": f"{tmp_path}/agent.py:OneAnswer"})
    check_parts(made)
    agent = parts.make(parts.AGENT, made.rollout.agent, made.rollout.agent_options, chat=ChatFormat(tokenizer))
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
    asked = tokenizer.decode(policy.prompts[0])
    assert "submit" not in asked and "How many?" in asked


def test_an_agent_that_cannot_act_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("class Part:\n    def __init__(self, *, chat): ...\n    def act(self, episode): ...\n")
    with pytest.raises(PluginError, match=r"rollout\.agent .* act is not async, and will be awaited"):
        check_parts(BASE.but({"rollout.agent": f"{tmp_path}/agent.py:Part"}))

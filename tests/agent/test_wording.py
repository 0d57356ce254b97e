"""A recipe's instructions and tool descriptions reach the policy and the record, and do not change the task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import ChatFormat, TurnLoop, load_tools
from agentrl.agent.contexts import with_instructions
from agentrl.agent.mcp.servers import RunTools
from agentrl.agent.template import read_template
from agentrl.agent.tools import BUILT_IN, Bounds, ToolWording, reworded_schema
from agentrl.errors import UserError
from agentrl.records import Message, Score, ScoredEpisode
from agentrl.session.transcript import transcript
from agentrl.testing import ScriptedPolicy, byte_tokenizer
from tests.agent.test_tools import call
from tests.episodes import make_runner, task, tokenizer

__all__ = ["make_runner", "task", "tokenizer"]

OTHER = ToolWording(description="Compute.", arguments={"code": "what to run"})


def test_descriptions_change_only_the_schema() -> None:
    before = BUILT_IN["python"].schema["function"]["description"]
    tools = load_tools(("python", "submit"), None, RunTools(servers={}, bounds={}, words={"python": OTHER}))
    function = tools["python"].schema["function"]
    assert (function["name"], function["description"], function["parameters"]["properties"]["code"]["description"]) == (
        "python",
        "Compute.",
        "what to run",
    )
    assert tools["submit"] is BUILT_IN["submit"] and BUILT_IN["python"].schema["function"]["description"] == before
    both = load_tools(("python",), None, RunTools(servers={}, bounds={"python": Bounds(calls=2)}, words={"python": OTHER}))["python"]
    assert both.bounds.calls == 2 and both.schema["function"]["description"] == "Compute."  # type: ignore[attr-defined]
    assert reworded_schema(BUILT_IN["python"].schema, ToolWording(arguments={"code": "c"}))["function"]["description"] == before
    assert reworded_schema(BUILT_IN["python"].schema, ToolWording(arguments={"code": ""})) == BUILT_IN["python"].schema, (
        "an empty text changes nothing"
    )
    with pytest.raises(UserError, match=r"tools\.python\.arguments\.cod: the tool has no such argument"):
        reworded_schema(BUILT_IN["python"].schema, ToolWording(arguments={"cod": "c"}))


def test_instructions_replace_system_messages() -> None:
    system, user = Message(role="system", content="Be brief."), Message(role="user", content="How many?")
    assert with_instructions((system, user), None) == (system, user)
    assert with_instructions((system, user), "Look first.") == (Message(role="system", content="Look first."), user)
    assert [message.role for message in with_instructions((user,), "Look first.")] == ["system", "user"]


async def test_instructions_reach_the_policy_and_the_record(make_runner: Any, task: Any) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = read_template("hermes", Path())  # this template shows the tools
    chat = ChatFormat(tokenizer)
    tools = RunTools(servers={}, bounds={}, words={"python": OTHER})
    plain = make_runner(ScriptedPolicy.saying(tokenizer, call("submit", answer="3")))
    task = replace(task, limits=replace(task.limits, episode_tokens=4000))
    runner = replace(plain, agent=TurnLoop(chat=chat, instructions="Look first."), tools=tools)
    episode = await runner.run(task, episode_id="e")
    (trajectory,) = episode.trajectories
    prompt = tokenizer.decode(trajectory.turns[0].prompt_ids)
    assert "Look first." in prompt and '"Compute."' in prompt and '"what to run"' in prompt and "Run Python code" not in prompt
    assert trajectory.prompt == with_instructions(task.prompt, "Look first.") and episode.task_key == task.key
    recorded = transcript(task, ScoredEpisode(episode=episode, score=Score(value=1.0)), phase="eval", step=0)
    assert recorded["messages"][0] == {"role": "system", "content": "Look first.", "tool_calls": []}
    assert (await plain.run(task, episode_id="f")).trajectories[0].prompt == ()

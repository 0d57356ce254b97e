"""Whatever text a policy writes, its episode ends with a score or a typed outcome, and is stored exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.calls import CLOSE, OPEN
from agentrl.agent.tools import ToolOutcome, function_schema
from agentrl.experience import SqliteStore
from agentrl.protocols import Sandbox
from agentrl.records import Episode, ExecResult, Group, Limits, Score, ScoredEpisode, Task
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing


class Spoiler:
    """A user-supplied tool that changes its arguments and returns half of a surrogate pair."""

    name = "spoil"
    needs_sandbox = False
    schema = function_schema("spoil", "Spoils.", "x", "anything")

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        assert isinstance(arguments, dict)
        arguments["x"].append(object())
        arguments["y"] = float("nan")
        return ToolOutcome(output="out \ud83d", ok=True, answer="answer \ude00" if arguments.get("end") else None)


spoil = Spoiler()


def call(body: str) -> str:
    return f"{OPEN}{body}{CLOSE}"


def submit(answer: str) -> str:
    return call('{"name": "submit", "arguments": {"answer": ' + answer + "}}")


def store_and_load(tmp_path: Path, episode: Episode) -> Episode:
    store = SqliteStore(tmp_path / "experience.sqlite")
    try:
        group = Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=0.0)),))
        store.put(group)
        assert store.groups([0]) == (group,)
        return store.groups([0])[0].episodes[0].episode
    finally:
        store.close()


UNRECORDABLE = [
    call(r'{"name":"python","arguments":{"code":"print(\"\ud83d\")"}}'),
    call(r'{"name":"\udc00","arguments":{}}'),
    call(r'{"name":"python","arguments":{"\ud800":"1"}}'),
    call('{"name":"python","arguments":{"code":' + "[" * 255 + "]" * 255 + "}}"),
    call('{"name":"python","arguments":{"code":NaN}}'),
    submit("1" * 4301),
    submit("1e999"),
    submit(r'"\ud83d"'),
    OPEN * 8000,
]


@pytest.mark.parametrize("text", UNRECORDABLE, ids=range(len(UNRECORDABLE)))
async def test_unrecordable_calls_are_errors_and_the_episode_continues(
    make_runner: Any, tokenizer: Any, task: Task, tmp_path: Path, text: str
) -> None:
    policy = ScriptedPolicy.saying(tokenizer, text, submit('"3"'))
    runner = replace(make_runner(policy), max_model_len=20_000)
    roomy = replace(task, limits=replace(task.limits, turn_tokens=10_000, episode_tokens=20_000))
    episode = store_and_load(tmp_path, await runner.run(roomy, episode_id="e"))
    first = episode.trajectories[0].turns[0]
    assert [(result.name, result.ok) for result in first.tool_results] == [("", False)] and not first.message.tool_calls
    assert first.tool_results[0].output.startswith("error: ")
    assert episode.answer == "3" and not episode.left_out


@pytest.mark.parametrize("answer", ["1" * 4000, "-0.0", "1e-320", '"' + "\\u0000\\u2028\\ud83d\\ude00" + '"'])
async def test_unusual_answers_are_submitted(make_runner: Any, tokenizer: Any, task: Task, tmp_path: Path, answer: str) -> None:
    policy = ScriptedPolicy.saying(tokenizer, submit(answer))
    runner = replace(make_runner(policy), max_model_len=20_000)
    roomy = replace(task, limits=replace(task.limits, turn_tokens=10_000, episode_tokens=20_000))
    episode = store_and_load(tmp_path, await runner.run(roomy, episode_id="e"))
    assert episode.trajectories[0].stop_reason == "submitted" and episode.answer


async def test_the_output_of_a_program_is_cleaned(make_runner: Any, tokenizer: Any, task: Task, tmp_path: Path) -> None:
    policy = ScriptedPolicy.saying(tokenizer, call('{"name":"python","arguments":{"code":"1"}}'), "done")
    result = ExecResult(exit_code=0, stdout="\udcff<|im_end|>", stderr="\ud800", wall_s=0.0)
    runner = make_runner(policy, ScriptedSandboxes(lambda _: result))
    episode = store_and_load(tmp_path, await runner.run(task, episode_id="e"))
    assert episode.trajectories[0].turns[0].tool_results[0].output == "\ufffd<|im_end|>\n\ufffd"


async def test_a_tool_cannot_change_what_the_agent_wrote(make_runner: Any, tokenizer: Any, task: Task, tmp_path: Path) -> None:
    texts = ('{"name":"spoil","arguments":{"x":[1]}}', '{"name":"spoil","arguments":{"x":[],"end":true}}')
    policy = ScriptedPolicy.saying(tokenizer, *map(call, texts))
    runner = make_runner(policy, ScriptedSandboxes(printing("")))
    task = replace(task, tools=(f"{__name__}:spoil", "submit"))
    episode = store_and_load(tmp_path, await runner.run(task, episode_id="e"))
    first, second = episode.trajectories[0].turns
    assert [dict(turn.message.tool_calls[0].arguments) for turn in (first, second)] == [{"x": [1]}, {"x": [], "end": True}]
    assert first.tool_results[0].output == "out \ufffd" and episode.answer == "answer \ufffd"

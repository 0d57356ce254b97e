"""The calls of a turn: concurrent if the tools allow it, with ordered results and budgets."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from agentrl.agent import load_tools, tool
from agentrl.agent.invoke import run_calls
from agentrl.agent.tools import Bounds
from agentrl.errors import InfrastructureError, PluginError
from agentrl.protocols import Sandbox
from agentrl.records import Limits, Task, ToolCall
from agentrl.testing import ScriptedPolicy
from tests.agent.test_tools import call

running: list[str] = []  # the calls that run now
running_at_start: list[list[str]] = []  # the calls that ran when each call started


async def _record_run(name: str, seconds: float) -> str:
    running.append(name)
    running_at_start.append(sorted(running))
    try:
        await asyncio.sleep(seconds)
    finally:
        running.remove(name)
    return name


@tool(together=True)
async def fetch(name: str, seconds: float = 0.02) -> str:
    """Fetch something."""
    if name == "broken":
        raise InfrastructureError("the line is down")
    return await _record_run(name, seconds)


@tool(calls=2, output_chars=5, timeout_s=0.1)
async def dear(name: str, seconds: float = 0.0) -> str:
    """Do something costly."""
    return await _record_run(name, seconds)


@dataclass
class Counts:
    """Created once per episode, even if several calls need it concurrently."""

    created: ClassVar[int] = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        Counts.created += 1

    @tool(together=True)
    async def add(self, name: str) -> int:
        """Add a name."""
        self.names.append(name)
        return len(self.names)


@pytest.fixture(autouse=True)
def cleared() -> None:
    running.clear()
    running_at_start.clear()
    Counts.created = 0


async def play(make_runner: Any, tokenizer: Any, task: Task, *turns: str) -> Any:
    limits = replace(task.limits, turns=9, turn_tokens=1200, episode_tokens=9000)
    names = tuple(f"{__name__}:{name}" for name in ("fetch", "dear", "Counts"))
    runner = make_runner(ScriptedPolicy.saying(tokenizer, *turns, call("submit", answer="1")))
    return await replace(runner, max_model_len=9000).run(replace(task, tools=(*names, "submit"), limits=limits), episode_id="e")


async def test_concurrent_calls_keep_the_order_of_results(tokenizer: Any, task: Task, make_runner: Any) -> None:
    calls = [call("fetch", name="a", seconds=0.06), call("fetch", name="b"), call("dear", name="c"), call("fetch", name="d")]
    episode = await play(make_runner, tokenizer, task, "".join(calls) + call("nosuch", x="1") + call("fetch", name="e"))
    turn = episode.trajectories[0].turns[0]
    assert [result.output for result in turn.tool_results[:4]] == ["a", "b", "c", "d"] and turn.tool_results[5].output == "e"
    assert running_at_start == [["a"], ["a", "b"], ["c"], ["d"], ["e"]] and "no tool 'nosuch'" in turn.tool_results[4].output
    assert turn.tool_results[0].wall_s > turn.tool_results[1].wall_s > 0


async def test_concurrent_calls_share_one_state(tokenizer: Any, task: Task, make_runner: Any) -> None:
    episode = await play(make_runner, tokenizer, task, "".join(call("add", name=name) for name in "abc"))
    assert [result.output for result in episode.trajectories[0].turns[0].tool_results] == ["1", "2", "3"] and Counts.created == 1


async def test_a_failure_of_a_concurrent_call_is_raised_after_all_have_ended(tokenizer: Any, task: Task, make_runner: Any) -> None:
    episode = await play(make_runner, tokenizer, task, call("fetch", name="a") + call("fetch", name="broken") + call("fetch", name="b"))
    assert episode.left_out and [failure.message for failure in episode.failures] == ["the line is down"]
    assert not running


async def test_the_end_of_the_episode_ends_concurrent_calls(tokenizer: Any, task: Task, make_runner: Any) -> None:
    task = replace(task, limits=replace(task.limits, wall_s=0.4))
    episode = await play(make_runner, tokenizer, task, call("fetch", name="a", seconds=8.0) + call("fetch", name="b", seconds=8.0))
    assert episode.trajectories[0].stop_reason == "wall_limit" and not running


async def test_a_budget_belongs_to_the_episode_and_the_agent_gets_an_error(tokenizer: Any, task: Task, make_runner: Any) -> None:
    turns = [call("dear", name="x" * 100) + call("dear"), call("dear", name="a"), call("dear", name="b") + call("fetch", name="c")]
    episode = await play(make_runner, tokenizer, task, *turns)
    first, *later = [[result.output for result in turn.tool_results] for turn in episode.trajectories[0].turns]
    assert first[0] == "xx\n... 96 characters cut ...\nxx" and "name: Field required" in first[1], "a call with wrong arguments counts"
    error_text = "error: dear may be called 2 times in an episode, and was: continue without it"
    assert later[:2] == [[error_text], [error_text, "c"]] and running_at_start == [["x" * 100], ["c"]]


async def test_a_tools_own_deadline_ends_its_call(tokenizer: Any, task: Task, make_runner: Any) -> None:
    episode = await play(make_runner, tokenizer, task, call("dear", name="a", seconds=5.0))
    assert episode.trajectories[0].turns[0].tool_results[0].output == "error: dear gave no result within 0.1 s"
    assert [failure.kind for failure in episode.failures] == ["tool_timeout"] and not episode.left_out


def test_bounds_override_limits_and_each_other() -> None:
    limits = Limits(tool_output_chars=50)
    over = Bounds(output_chars=500).apply_to(limits)
    assert (over.tool_output_chars, over.tool_timeout_s, over.all_output_chars) == (500, 10.0, 1000), "the episode's limit is unchanged"
    assert Bounds(calls=1, timeout_s=2.0).overridden_by(Bounds(calls=3)) == Bounds(calls=3, timeout_s=2.0)
    with pytest.raises(PluginError, match="calls=0"):
        tool(calls=0)


def test_programs_of_a_sandbox_never_run_concurrently() -> None:
    with pytest.raises(PluginError, match="programs run one at a time"):
        load_tools((f"{__name__}:both",))


@tool(together=True)
async def both(box: Sandbox) -> str:
    """Use a sandbox."""
    return box.id


async def test_results_of_concurrent_calls_are_recorded_if_another_agent_loses_the_sandbox() -> None:
    tools = load_tools((f"{__name__}:fetch",))
    episode: Any = SimpleNamespace(
        sandbox_lost=True,
        running=lambda sandbox: nullcontext(),
        clip_output=str,
        turn_count=1,
        id="e",
        tools=None,
        task=SimpleNamespace(id="t", limits=Limits()),
    )
    calls = [ToolCall(name="fetch", arguments={"name": name}) for name in "ab"] + [ToolCall(name="nosuch", arguments={})]
    results, answer = await run_calls(episode, tools, calls, spent=Counter())
    assert [result.output for result in results] == ["a", "b"] and answer is None, "no later call runs"

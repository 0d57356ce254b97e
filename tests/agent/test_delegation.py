"""The tool that starts sub-agents: concurrent, each in its own context, within the limits of the tree of agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.agent import tool
from agentrl.agent.tools import ToolOutcome
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.config.rollout import DelegationConfig
from agentrl.errors import RecipeError, ServingError
from agentrl.records import EpisodeState, Parent, Task, codec
from agentrl.rollout import CaptureState, EpisodeRunner
from agentrl.session.preflight import check_delegation
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.agent.trees import PRINT, call, contexts, delegate, make_runner, outputs, tool_responses, tree_task, user_prompt

Runs = Callable[..., EpisodeRunner]


@pytest.fixture
def tree(task: Task) -> Task:
    return tree_task(task)


@pytest.fixture
def runs(tokenizer: Any) -> Runs:
    def make(reads: Any, sandboxes: ScriptedSandboxes | None = None, **settings: Any) -> EpisodeRunner:
        return make_runner(tokenizer, reads, sandboxes, delegation=DelegationConfig(**settings))

    return make


async def test_sub_agents_run_concurrently_each_in_its_own_context(tree: Task, runs: Runs) -> None:
    barrier = asyncio.Barrier(2)

    async def reads(context: str) -> str:
        if user_prompt(context) == "How many?":
            return f"{' and '.join(tool_responses(context))}" if tool_responses(context) else delegate("rows?", "columns?")
        if not tool_responses(context):
            await asyncio.wait_for(barrier.wait(), 5.0)  # passes only if both run concurrently
            return PRINT
        await asyncio.sleep(0.01 if user_prompt(context) == "rows?" else 0.0)  # the first ends last
        return f"{user_prompt(context)} {tool_responses(context)[0]}"

    sandboxes = ScriptedSandboxes(printing("3"))
    runner = runs(reads, sandboxes)
    episode = await runner.run(tree, episode_id="e")
    assert episode.answer == "rows? 3 and columns? 3" and not episode.failures
    assert [trajectory.agent for trajectory in episode.trajectories] == ["main", "worker", "worker"]
    assert [one.parent for one in episode.trajectories[1:]] == [Parent(trajectory=0, turn=0, call=number) for number in (0, 1)]
    assert [trajectory.prompt[0].content for trajectory in episode.trajectories[1:]] == ["rows?", "columns?"]
    assert [trajectory.stop_reason for trajectory in episode.trajectories] == ["answered"] * 3
    assert len(sandboxes.opened) == 1, "they share the episode's sandbox"
    assert sorted(runner.policy.prompts) == contexts(episode)  # type: ignore[attr-defined]


def scripted(**completions: str) -> Callable[[str], str]:
    """The completions of the main agent, then those of each sub-agent by its task; the main agent's answer repeats its results."""

    def reads(context: str) -> str:
        if user_prompt(context) == "How many?":
            return " | ".join(tool_responses(context)) if tool_responses(context) else completions["main"]
        return completions[user_prompt(context)]

    return reads


@pytest.mark.parametrize(
    ("main", "settings", "expected"),
    [
        (
            delegate("a") + PRINT + delegate("a", "a"),
            {"total": 2},
            "A | 3 | A | error: 2 helpers were started",
        ),
        (delegate(7), {}, 'error: delegate needs {"task": "..."}'),
        (delegate(" "), {}, 'error: delegate needs {"task": "..."}'),
        (delegate("x" * 500), {}, "error: a task may have 400 characters, not 500"),
        (delegate("deeper"), {}, "error: no tool 'delegate'; tools: python"),
        (delegate("deeper"), {"depth": 2}, "A"),
        (delegate("loops"), {"turns": 2}, "error: the helper ended without an answer (turn_limit)"),
        (delegate("submits"), {"tools": ("submit",)}, "42"),
        (delegate("long"), {"tools": ("submit",)}, "error: the helper ended without an answer (answered)"),
        (delegate("<|im_end|>"), {}, "broken up"),
        (call("delegat", task="a"), {}, "error: no tool 'delegat'; tools: python, delegate"),
    ],
)
async def test_excessive_and_invalid_delegation_calls_get_an_error(
    main: str, settings: dict[str, Any], expected: str, tree: Task, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.agent.delegation.MAX_TASK_CHARS", 400)

    def reads(context: str) -> str:
        if user_prompt(context) == "deeper":  # answers with the output it got
            return tool_responses(context)[0] if tool_responses(context) else delegate("a")
        if user_prompt(context) == "< |im_end|>":
            return "broken up"
        loops, submits = PRINT, call("submit", answer="42")
        return scripted(main=main, a="A", loops=loops, long="so " * 100, submits=submits)(context)

    episode = await runs(reads, **settings).run(tree, episode_id="e")
    assert episode.answer is not None and episode.answer.startswith(expected) and not episode.failures
    assert all(trajectory.stop_reason for trajectory in episode.trajectories)


async def test_the_limits_of_the_task_apply_to_the_tree(tree: Task, runs: Runs) -> None:
    reads = scripted(main=delegate("a", "loops", "loops"), a="A", loops=PRINT)
    for turns in range(2, 8):
        policy = runs(reads, turns=9)
        episode = await policy.run(replace(tree, limits=replace(tree.limits, turns=turns)), episode_id="e")
        assert sum(len(one.turns) for one in episode.trajectories) == turns and episode.answer is None and not episode.left_out
        assert {trajectory.stop_reason for trajectory in episode.trajectories} <= {"answered", "turn_limit"}
    tight = replace(tree, limits=replace(tree.limits, tool_output_chars=100, episode_output_chars=40))
    episode = await runs(scripted(main=delegate("a"), a="x" * 300)).run(tight, episode_id="e")
    assert len(outputs(episode.trajectories[0])[0]) < 120, "an answer is a tool output, and clipped like one"


async def test_a_state_is_captured_when_no_sub_agent_runs_and_resumes_to_the_same_end(tree: Task, runs: Runs) -> None:
    def reads(context: str) -> str:
        if user_prompt(context) != "How many?":
            return tool_responses(context)[0] if tool_responses(context) else PRINT
        return {0: delegate("a", "b"), 2: PRINT, 3: delegate("c")}.get(
            len(tool_responses(context)), f"done {' '.join(tool_responses(context))}"
        )

    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None and state.turn_count == turns
        assert [trajectory.stop_reason for trajectory in state.trajectories] == ["", *["answered"] * (len(state.trajectories) - 1)]
        states.append(codec.from_json(EpisodeState, codec.to_json(state)))

    uninterrupted = await runs(reads, total=4).run(tree, episode_id="e", on_turn=on_turn)
    assert uninterrupted.answer == "done 3 3 3 3" and [state.turn_count for state in states] == [5, 6, 9]
    for state in states:
        resumed = await runs(reads, total=4).run(tree, episode_id="e", start=state)
        assert [(trajectory.agent, trajectory.parent, outputs(trajectory)) for trajectory in resumed.trajectories] == [
            (trajectory.agent, trajectory.parent, outputs(trajectory)) for trajectory in uninterrupted.trajectories
        ]
        fewer = await runs(reads, total=2).run(tree, episode_id="e", start=state)
        message = "error: 2 helpers were started, and no more are allowed"
        assert (message in outputs(fewer.trajectories[0])) == (state.turn_count < 9), "helpers that were started before the resume count"


async def test_a_fault_in_one_sub_agent_ends_the_others_and_excludes_the_episode(tree: Task, runs: Runs) -> None:
    cancelled = []

    async def reads(context: str) -> str:
        if user_prompt(context) == "fails":
            raise ServingError("the server is gone")
        if user_prompt(context) == "waits":
            try:
                await asyncio.sleep(30.0)
            finally:
                cancelled.append(True)
        return delegate("waits", "fails")

    episode = await asyncio.wait_for(runs(reads).run(tree, episode_id="e"), 5.0)
    assert episode.left_out and [(one.stage, one.kind) for one in episode.failures] == [("generate", "ServingError")] and cancelled


@pytest.mark.parametrize("in_use", [True, False])
async def test_a_sandbox_that_one_sub_agent_closes_is_a_policy_failure_for_all(in_use: bool, tree: Task, runs: Runs) -> None:
    use.closed, use.waits = asyncio.Event(), asyncio.Event()

    async def reads(context: str) -> str:
        if user_prompt(context) == "How many?":
            return delegate("close", "wait")
        if user_prompt(context) == "close" and in_use:
            await use.waits.wait()
        if user_prompt(context) == "wait" and not in_use:
            await use.closed.wait()
        return call("use", how=user_prompt(context))

    broken = replace(tree, tools=("tests.agent.test_delegation:use",))
    episode = await asyncio.wait_for(runs(reads).run(broken, episode_id="e"), 5.0)
    assert not episode.left_out and episode.answer is None and [failure.kind for failure in episode.failures] == ["sandbox_abandoned"]
    assert [trajectory.stop_reason for trajectory in episode.trajectories] == ["tool_timeout"] * 3
    assert "another agent's call" in outputs(episode.trajectories[2])[0]


class _Use:
    """Closes the sandbox, or uses it afterwards."""

    name, needs_sandbox = "use", True
    schema: ClassVar = {"type": "function", "function": {"name": "use", "parameters": {}}}
    closed: asyncio.Event
    waits: asyncio.Event

    async def __call__(self, arguments: Any, sandbox: Any, limits: Any) -> ToolOutcome:
        if arguments["how"] == "close":
            await sandbox.close()
            self.closed.set()
        else:
            self.waits.set()
            await self.closed.wait()
            await sandbox.python("1", timeout_s=1.0)
        return ToolOutcome(output="done", ok=True)


use = _Use()


async def test_concurrent_agents_share_a_tools_budget(tree: Task, runs: Runs) -> None:
    barrier = asyncio.Barrier(2)

    async def reads(context: str) -> str:
        if not tool_responses(context) and user_prompt(context) != "How many?":
            await asyncio.wait_for(barrier.wait(), 5.0)  # neither agent has a recorded turn yet
            return call("scarce")
        return " | ".join(tool_responses(context)) if tool_responses(context) else delegate("a", "b")

    scarce = replace(tree, tools=("tests.agent.test_delegation:scarce",))
    episode = await runs(reads).run(scarce, episode_id="e")
    assert episode.answer is not None and sorted(episode.answer.split(" | "))[1] == "had" and "may be called 1 times" in episode.answer


@tool(calls=1)
async def scarce() -> str:
    """Can be called once."""
    return "had"


async def test_a_tool_of_the_same_name_is_a_task_error(tree: Task, runs: Runs) -> None:
    clash = replace(tree, tools=("tests.agent.test_delegation:Clash",))
    episode = await runs(lambda context: "").run(clash, episode_id="e")
    assert [failure.kind for failure in episode.failures] == ["TaskError"] and "'delegate'" in episode.failures[0].message


class _Clash:
    name, needs_sandbox = "delegate", False
    schema: ClassVar = {"type": "function", "function": {"name": "delegate", "parameters": {}}}

    async def __call__(self, arguments: Any, sandbox: Any, limits: Any) -> Any: ...


Clash = _Clash()


def test_unknown_tools_of_sub_agents_raise_before_the_run_starts() -> None:
    base = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
    with pytest.raises(RecipeError, match=r"rollout\.delegation\.tools: unknown tool 'pyton'"):
        check_delegation(base.but({"rollout.agent": "delegating", "rollout.delegation.tools": ["pyton"]}), root=Path())

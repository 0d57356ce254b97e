"""Budgets of an episode: tool calls, and the tokens of all its contexts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.config.rollout import DelegationConfig
from agentrl.records import Blame, EpisodeState, Task, codec
from agentrl.rollout import CaptureState
from tests.agent.trees import PRINT, call, delegate, make_runner, outputs, tool_responses, tree_task, user_prompt
from tests.episodes import task, tokenizer

__all__ = ["task", "tokenizer"]

USED_UP = "may make 3 tool calls"


def limited(task: Task, **limits: Any) -> Task:
    unlimited = tree_task(task)
    return replace(unlimited, limits=replace(unlimited.limits, **limits), tools=("python", "submit"))


async def test_calls_of_all_agents_count_and_an_answer_is_always_accepted(tokenizer: Any, task: Task) -> None:
    """The calls of a sub-agent, of an unknown tool, and of `delegate` use up the budget; then only submitting is possible."""

    def reads(context: str) -> str:
        if user_prompt(context) == "a":
            return PRINT if not tool_responses(context) else "found"
        output_count = len(tool_responses(context))
        return [delegate("a"), call("gone"), PRINT + delegate("b"), call("submit", answer="3")][min(output_count, 3)]

    runner = make_runner(tokenizer, reads, delegation=DelegationConfig(turns=4, tools=("python",)))
    episode = await runner.run(limited(task, tool_calls=3), episode_id="e")
    first, second, *rest = outputs(episode.trajectories[0])
    assert first == "found" and "no tool 'gone'" in second and len(rest) == 3
    assert all(USED_UP in output for output in rest[:2]) and rest[2] == "submitted" and episode.answer == "3"
    assert len(episode.trajectories) == 2, "no sub-agent was started beyond the budget"
    assert {(failure.blame, failure.kind) for failure in episode.failures} == {(Blame.POLICY, "tool_calls")} and len(episode.failures) == 2
    assert not episode.left_out


async def test_calls_before_a_resume_count(tokenizer: Any, task: Task) -> None:
    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None
        states.append(codec.from_json(EpisodeState, codec.to_json(state)))

    broken = "<tool_call>{not json}</tool_call>"
    turns = [broken, PRINT, call("gone"), PRINT, call("submit", answer="3")]
    runner = make_runner(tokenizer, lambda context: turns[len(tool_responses(context))])
    uninterrupted = await runner.run(limited(task, tool_calls=3), episode_id="e", on_turn=on_turn)
    assert [USED_UP in output for output in outputs(uninterrupted.trajectories[0])] == [False, False, False, True, False]
    for state in states:
        resumed = await runner.run(limited(task, tool_calls=3), episode_id="e", start=state)
        assert outputs(resumed.trajectories[0]) == outputs(uninterrupted.trajectories[0])


@pytest.mark.parametrize("spare", [0, 90])
async def test_the_tokens_of_all_contexts_together_are_bounded(tokenizer: Any, task: Task, spare: int) -> None:
    """If the sub-agent used up the tokens, its parent has none left, however short its context is."""

    def reads(context: str) -> str:
        if user_prompt(context) == "a":
            return "x" * 500
        return delegate("a") if not tool_responses(context) else "done " * 10

    runner = make_runner(tokenizer, reads, delegation=DelegationConfig())
    unbounded = await runner.run(limited(task), episode_id="e")
    token_count = sum(len(turn.prompt_ids) + len(turn.completion_ids) for trajectory in unbounded.trajectories for turn in trajectory.turns)
    last_completion = len(unbounded.trajectories[0].turns[-1].completion_ids)
    bounded = await runner.run(limited(task, all_tokens=token_count - last_completion + spare), episode_id="e")
    turns = bounded.trajectories[0].turns
    assert bounded.stop_reason == ("token_limit" if spare == 0 else "answered") and len(turns) == (1 if spare == 0 else 2)
    spent = sum(len(turn.prompt_ids) + len(turn.completion_ids) for trajectory in bounded.trajectories for turn in trajectory.turns)
    assert spent <= token_count - last_completion + spare and not bounded.left_out


async def test_a_helper_whose_task_does_not_fit_uses_no_turn(tokenizer: Any, task: Task) -> None:
    runner = make_runner(
        tokenizer, lambda context: "done" if tool_responses(context) else delegate("a"), delegation=DelegationConfig(instruction="i" * 1500)
    )
    short = replace(limited(task, all_tokens=1500), limits=replace(limited(task, all_tokens=1500).limits, episode_tokens=700))
    episode = await runner.run(short, episode_id="e")
    assert [(trajectory.agent, trajectory.stop_reason, len(trajectory.turns)) for trajectory in episode.trajectories] == [
        ("main", "answered", 2),
        ("worker", "token_limit", 0),
    ]

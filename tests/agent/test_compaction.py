"""Contexts that continue from a summary: their content, rejected summaries, and the cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent.contexts import HEAD, MAX_SUMMARY_TOKENS, SUMMARY_REQUEST
from agentrl.config.recipe import TasksConfig
from agentrl.config.rollout import DelegationConfig
from agentrl.environment import close_environments
from agentrl.plugins.parts import Part
from agentrl.records import Episode, EpisodeState, Parent, Split, Task, codec
from agentrl.rollout import CaptureState, EpisodeRunner
from agentrl.task import open_family
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.agent.trees import PRINT, contexts, delegate, make_runner, outputs, tool_responses, tree_task, turn_texts, user_prompt

Runs = Callable[..., EpisodeRunner]
PAGE = "page " * 60  # what the tool prints: 300 tokens


@pytest.fixture
def task_of_pages(task: Task) -> Task:
    return tree_task(task)


@pytest.fixture
def runs(tokenizer: Any) -> Runs:
    def make(reads: Any, output: str = PAGE, *, delegation: DelegationConfig | None = None, share: float = 0.175) -> EpisodeRunner:
        return make_runner(tokenizer, reads, ScriptedSandboxes(printing(output)), compaction=share, delegation=delegation)

    return make


def reading(pages: int, *summaries: str) -> Callable[[str], str]:
    """Turns pages, summarizes the count of pages seen, and answers at the last page."""
    next_summaries = iter(summaries)

    def reads(context: str) -> str:
        if context.rstrip().endswith(SUMMARY_REQUEST + "\n</tool_response><|im_end|>\n<|im_start|>assistant"):
            return next(next_summaries)
        pages_before = int(user_prompt(context).rpartition("seen ")[2]) if HEAD in user_prompt(context) else 0
        return PRINT if pages_before + len(tool_responses(context)) < pages else f"done after {pages_before}"

    return reads


def agents(episode: Episode) -> list[tuple[str, str]]:
    return [(trajectory.agent, trajectory.stop_reason) for trajectory in episode.trajectories]


async def test_an_agent_continues_from_its_summary(task_of_pages: Task, runs: Runs) -> None:
    runner = runs(reading(5, "seen 2", "seen 4"))
    episode = await runner.run(task_of_pages, episode_id="e")
    assert episode.answer == "done after 4" and episode.stop_reason == "answered" and not episode.failures
    compacted, summarized = ("main", "compacted"), ("summary", "summarized")
    assert agents(episode) == [compacted, summarized, compacted, summarized, ("main", "answered")]
    assert [one.parent and (one.parent.trajectory, one.parent.turn, one.parent.call) for one in episode.trajectories] == [
        None, (0, 1, None), (1, 0, None), (2, 1, None), (3, 0, None)
    ]  # fmt: skip
    assert [trajectory.prompt[0].content for trajectory in episode.trajectories[1:]] == [
        SUMMARY_REQUEST, f"How many?\n\n{HEAD}\nseen 2", SUMMARY_REQUEST, f"How many?\n\n{HEAD}\nseen 4"
    ]  # fmt: skip
    expected_texts = [["calls"] * 2, ["seen 2"], ["calls"] * 2, ["seen 4"], ["calls", "done after 4"]]
    assert [turn_texts(trajectory) for trajectory in episode.trajectories] == expected_texts
    assert outputs(episode.trajectories[0]) == [PAGE, f"{PAGE}\n\n{SUMMARY_REQUEST}"]
    policy: Any = runner.policy
    assert sorted(policy.prompts) == contexts(episode), "each turn was sampled from its own trajectory's tokens"
    assert max(map(len, policy.prompts)) < 1300 < sum(len(turn.prompt_ids) for one in episode.trajectories for turn in one.turns)


@pytest.mark.parametrize("all_tokens", range(600, 3200, 200))
async def test_a_summary_beyond_all_tokens_ends_the_agent(all_tokens: int, task_of_pages: Task, runs: Runs) -> None:
    """A summary's context counts as a second copy of the agent's context; reaching the limit this way is no failure."""
    bounded = replace(task_of_pages, limits=replace(task_of_pages.limits, all_tokens=all_tokens))
    episode = await runs(reading(99, *("seen 2" for _ in range(9)))).run(bounded, episode_id="e")
    assert episode.stop_reason == "token_limit" and not episode.failures and not episode.left_out
    assert sum(len(turn.prompt_ids) + len(turn.completion_ids) for one in episode.trajectories for turn in one.turns) <= all_tokens


@pytest.mark.parametrize("bad", ["", "  \n", PRINT, "so " * 200, "<tool_call>"])
async def test_a_rejected_summary_is_not_part_of_any_context(bad: str, task_of_pages: Task, runs: Runs) -> None:
    runner = runs(reading(3, bad, "seen 2"))
    episode = await runner.run(task_of_pages, episode_id="e")
    assert agents(episode) == [("main", "compacted"), ("summary", "rejected"), ("summary", "summarized"), ("main", "answered")]
    rejected, accepted = episode.trajectories[1:3]
    assert rejected.parent == accepted.parent == Parent(trajectory=0, turn=1) and episode.trajectories[3].parent == Parent(
        trajectory=2, turn=0
    )
    assert rejected.turns[0].prompt_ids == accepted.turns[0].prompt_ids and len(rejected.turns[0].completion_ids) <= MAX_SUMMARY_TOKENS
    policy: Any = runner.policy
    assert policy.prompts[2] == policy.prompts[3] and sorted(policy.prompts) == contexts(episode)
    assert episode.answer == "done after 2" and episode.stop_reason == "answered" and not episode.failures


async def test_attempts_at_a_summary_are_bounded_and_count_as_turns(task_of_pages: Task, runs: Runs) -> None:
    episode = await runs(reading(9, *[""] * 9)).run(task_of_pages, episode_id="e")
    assert agents(episode) == [("main", "token_limit"), *[("summary", "rejected")] * 2]
    assert episode.stop_reason == "token_limit" and episode.answer is None and not episode.left_out
    for turns, last in ((2, []), (3, ["rejected"])):
        short = replace(task_of_pages, limits=replace(task_of_pages.limits, turns=turns))
        episode = await runs(reading(9, *[""] * 9)).run(short, episode_id="e")
        assert [trajectory.stop_reason for trajectory in episode.trajectories] == ["turn_limit", *last]


@pytest.mark.parametrize("room", [700, 1000, 1250])
async def test_an_output_that_leaves_no_room_for_a_summary_is_withheld(room: int, task_of_pages: Task, runs: Runs) -> None:
    tight = replace(task_of_pages, limits=replace(task_of_pages.limits, episode_tokens=room))
    runner = runs(reading(9, "seen 9"), "x" * (room - 200), share=0.5)
    episode = await runner.run(tight, episode_id="e")
    policy: Any = runner.policy
    assert max(map(len, policy.prompts)) < room and episode.answer == "done after 9"
    assert outputs(episode.trajectories[0]) == [f"error: not shown, because there is no room for it\n\n{SUMMARY_REQUEST}"]
    assert all(sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in one.turns) <= room for one in episode.trajectories)


async def test_a_sub_agent_summarizes_within_its_budget(task_of_pages: Task, runs: Runs) -> None:
    pages = reading(3, "seen 2")

    def reads(context: str) -> str:
        return pages(context) if user_prompt(context) != "How many?" else (tool_responses(context) or [delegate("read")])[0]

    episode = await runs(reads, delegation=DelegationConfig(turns=8)).run(task_of_pages, episode_id="e")
    assert agents(episode) == [("main", "answered"), ("worker", "compacted"), ("summary", "summarized"), ("worker", "answered")]
    assert episode.answer == "done after 2" and [trajectory.parent for trajectory in episode.trajectories[2:]] == [
        Parent(trajectory=1, turn=1), Parent(trajectory=2, turn=0)
    ]  # fmt: skip
    pages = reading(3, "seen 2")
    episode = await runs(reads, delegation=DelegationConfig(turns=3)).run(task_of_pages, episode_id="e")
    assert agents(episode)[2:] == [("summary", "summarized"), ("worker", "turn_limit")], "two turns and a summary are three"
    assert episode.answer == "error: the helper ended without an answer (turn_limit)"


async def test_a_state_after_a_summary_resumes_in_the_new_context(task_of_pages: Task, runs: Runs) -> None:
    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None and [trajectory.stop_reason for trajectory in state.trajectories].count("") == 1
        states.append(codec.from_json(EpisodeState, codec.to_json(state)))

    full = await runs(reading(5, "seen 2", "seen 4")).run(task_of_pages, episode_id="e", on_turn=on_turn)
    assert [state.turn_count for state in states] == [1, 3, 4, 6, 7] and [len(state.trajectories) for state in states] == [1, 3, 3, 5, 5]
    for number, state in enumerate(states):
        remaining = ("seen 2", "seen 4")[(number + 1) // 2 :]
        resumed = await runs(reading(5, *remaining)).run(task_of_pages, episode_id="e", start=state)
        assert contexts(resumed) == contexts(full) and agents(resumed) == agents(full) and resumed.answer == full.answer


async def test_control_tokens_in_a_summary_are_escaped(task_of_pages: Task, runs: Runs, tokenizer: Any) -> None:
    forged = "seen 2<|im_start|>"
    runner = runs(reading(9, forged, forged))
    runner.policy.reads = lambda context: f"{HEAD in context}" if HEAD in context else reading(9, forged)(context)  # type: ignore[attr-defined]
    episode = await runner.run(task_of_pages, episode_id="e")
    assert episode.answer == "True" and episode.trajectories[2].prompt[0].content.endswith("seen 2< |im_start|>")


@pytest.mark.slow
async def test_an_observation_forges_no_turn_after_a_summary(tokenizer: Any) -> None:
    """The first observation of an environment is hostile also in the context that continues from a summary."""
    config = TasksConfig(family=Part("tests.environment.examples:Echo"))
    task = open_family(config, seed=0).task(Split.TRAIN, 0)

    def reads(context: str) -> str:
        return "short" if SUMMARY_REQUEST in context.rpartition("<|im_end|>\n<|im_start|>assistant")[0][-400:] else "a" * 200

    runner = make_runner(tokenizer, reads, compaction=0.2)
    try:
        episode = await runner.run(task, episode_id="e")
    finally:
        await close_environments()
    assert ("main", "compacted") in agents(episode)
    for turn in (turn for trajectory in episode.trajectories for turn in trajectory.turns):
        assert "<|im_start|>system" not in tokenizer.decode(turn.prompt_ids)

"""Episodes in environments, played by the turn loop with a scripted policy."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.agent.agent_environment import check_environment
from agentrl.config.recipe import TasksConfig
from agentrl.environment import close_environments
from agentrl.environment.returns import episode_return
from agentrl.errors import UserError
from agentrl.plugins.parts import Part
from agentrl.records import Blame, EnvironmentSpec, Episode, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.task import open_family
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of
from tests.episodes import tokenizer as tokenizer

pytestmark = pytest.mark.slow

EXAMPLES = "tests.environment.examples:"


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


def task_of(name: str, **options: Any) -> Task:
    return open_family(TasksConfig(family=Part(f"{EXAMPLES}{name}", options)), seed=0).task(Split.TRAIN, 0)


async def play(task: Task, tokenizer: Any, *texts: str, instructions: str | None = None) -> tuple[Episode, ScriptedPolicy]:
    policy = ScriptedPolicy.saying(tokenizer, *texts)
    runner = EpisodeRunner(
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=chat_of(tokenizer), instructions=instructions),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )
    return await runner.run(task, episode_id="e"), policy


async def test_text_actions_are_answered_by_user_messages_and_rewarded(tokenizer: Any) -> None:
    task = task_of("Count")
    episode, policy = await play(task, tokenizer, "2", "x", "3")
    (trajectory,) = episode.trajectories
    assert trajectory.stop_reason == "terminated" and not episode.failures
    assert [turn.tool_results[0].reward for turn in trajectory.turns] == [2.0, 0.0, 3.0]
    assert [turn.tool_results[0].output for turn in trajectory.turns] == ["total 2", "error: write a number", "total 5"]
    assert "<|im_start|>user\ntotal 2<|im_end|>" in tokenizer.decode(policy.prompts[1])
    score = await episode_return(task, episode)
    assert score.value == 5.0 and score.parts == {"progress": 2.5} and score.turn_rewards == ((2.0, 0.0, 3.0),)


async def test_a_choice_is_constrained_to_the_actions(tokenizer: Any) -> None:
    episode, policy = await play(task_of("Guess"), tokenizer, "2")
    assert tokenizer.decode(policy.prompts[0]).startswith(
        "<|im_start|>system\nGuess the number.<|im_end|>\n<|im_start|>user\nWhich number?"
    )
    assert episode.stop_reason == "terminated"
    assert episode.trajectories[0].turns[0].supports is not None


async def test_calls_are_steps_and_a_later_call_of_the_last_turn_does_nothing(tokenizer: Any) -> None:
    def calls(*doors: int) -> str:
        return "".join(f'<tool_call>\n{{"name": "open", "arguments": {{"door": {door}}}}}\n</tool_call>' for door in doors)

    episode, _ = await play(task_of("Doors"), tokenizer, calls(1), calls(2, 1))
    turns = episode.trajectories[0].turns
    assert [[result.reward for result in turn.tool_results] for turn in turns] == [[1.0], [2.0, None]]
    assert episode.stop_reason == "terminated"


async def test_a_new_context_starts_from_the_last_observation(tokenizer: Any) -> None:
    task = task_of("Count", goal=100, most=5, context_turns=2)
    episode, policy = await play(task, tokenizer, *"12345")
    assert [len(trajectory.turns) for trajectory in episode.trajectories] == [2, 2, 1]
    assert [trajectory.stop_reason for trajectory in episode.trajectories] == ["continued", "continued", "truncated"]
    assert episode.stop_reason == "truncated"
    assert tokenizer.decode(policy.prompts[2]) == "<|im_start|>user\ntotal 3<|im_end|>\n<|im_start|>assistant\n"
    assert (await episode_return(task, episode)).turn_rewards == ((1.0, 2.0), (3.0, 4.0), (5.0,))


async def test_control_tokens_in_an_observation_are_escaped(tokenizer: Any) -> None:
    task = task_of("Echo")
    _, policy = await play(task, tokenizer, "<|im_end|", "end")
    last = tokenizer.decode(policy.prompts[-1])
    assert "< |im_start|>system" in last and last.count("<|im_start|>") == 4


FAULTS = ("raise", "exit", "die", "nan", "infinite", "long", "none", "short", "text_reward", "number_flag", "bytes", "parts")


@pytest.mark.parametrize("how", FAULTS)
async def test_a_fault_of_an_environment_gives_no_score(tokenizer: Any, how: str) -> None:
    for at in ("step", "reset"):
        if at == "reset" and how in ("nan", "infinite", "short", "text_reward", "number_flag", "parts"):
            continue  # a reset returns no reward; any tuple is wrong
        episode, _ = await play(task_of("Faulty", how=how, at=at), tokenizer, "a", "b")
        (failure,) = episode.failures
        assert (
            episode.left_out
            and failure.blame is Blame.INFRASTRUCTURE
            and failure.kind == ("EnvironmentCrash" if how == "die" else "EnvironmentFault")
        ), how
        assert failure.stage == "environment"


async def test_a_task_that_cannot_be_played_is_blamed_on_the_task(tokenizer: Any) -> None:
    episode, _ = await play(task_of("Faulty", how="task"), tokenizer, "a")
    assert [(failure.blame, failure.message) for failure in episode.failures] == [(Blame.TASK, "no such level")]


async def test_an_environment_that_the_agent_cannot_play_is_an_error_before_the_run(tokenizer: Any) -> None:
    game = open_family(TasksConfig(family=Part("sandboxes.games:KuhnPoker")), seed=0).task(Split.TRAIN, 0)
    await check_environment(game, chat_of(tokenizer), "players")
    for task, agent, fix in ((game, "turns", "players"), (game, "delegating", "players"), (task_of("Guess"), "players", "turns")):
        with pytest.raises(UserError, match=rf"{agent} cannot play an environment with.* roles\n  fix: set rollout.agent={fix}"):
            await check_environment(task, chat_of(tokenizer), agent)
    (failure,) = (await play(game, tokenizer, "b"))[0].failures
    assert "fix: set rollout.agent=players" in failure.message and failure.blame is Blame.TASK


@pytest.mark.parametrize(("ref", "options"), [("Remote", {"how": "open"}), ("Remote", {"how": "start"}), ("Unusable", {})])
async def test_a_user_supplied_environment_that_does_not_start_is_an_error_before_the_run(tokenizer: Any, ref: str, options: Any) -> None:
    spec = EnvironmentSpec(ref=f"tests.environment.examples:{ref}", options=options)
    with pytest.raises(UserError, match=r"does not start: (?s:.*)no (connection|level|licence)\n  fix: correct the environment"):
        await check_environment(replace(task_of("Guess"), environment=spec), chat_of(tokenizer))


async def test_an_error_at_the_end_does_not_change_the_score(tokenizer: Any) -> None:
    task = task_of("Faulty", at="close", limits={"turns": 1})
    episode, _ = await play(task, tokenizer, "a")
    assert not episode.failures and episode.stop_reason == "turn_limit"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (" left", "read as 'left'"),
        ("a\n", "read as 'a'"),
        ("<|im_end|>", "control token"),
        ("<think>a</think>b", "read as 'b'"),
        ("<tool_call>", "control token"),
        ("z" * 5000, "limits.turn_tokens"),
        ("left", ""),
        ("go left\tnow", ""),
        ("é", ""),
    ],
)
async def test_a_choice_that_cannot_be_answered_is_an_error_before_the_run(tokenizer: Any, choice: str, message: str) -> None:
    task = task_of("Choices", choices=["a", choice])
    if not message:
        await check_environment(task, chat_of(tokenizer))
        return
    with pytest.raises(UserError, match=re.escape(message)):
        await check_environment(task, chat_of(tokenizer))

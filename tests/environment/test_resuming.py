"""Episodes that another process continues from a snapshot, by a replay of their actions, or from the start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.environment import close_environments, episode_return
from agentrl.records import Blame, EpisodeState, Task, codec
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of
from tests.environment.test_crashing import CALL, UNKNOWN
from tests.environment.test_playing import task_of
from tests.episodes import tokenizer as tokenizer

pytestmark = pytest.mark.slow

ACTIONS = ("1", "x", "2", "1", "4")


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


def runner_of(tokenizer: Any, *texts: str) -> EpisodeRunner:
    return EpisodeRunner(
        policy=ScriptedPolicy.saying(tokenizer, *texts),
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=chat_of(tokenizer)),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )


async def captured(task: Task, tokenizer: Any, after: int) -> EpisodeState | None:
    """Returns the encoded and decoded state after a turn."""
    states: dict[int, EpisodeState | None] = {}

    async def on_turn(count: int, capture: Any) -> None:
        states[count] = await capture()

    await runner_of(tokenizer, *ACTIONS).run(task, episode_id="e", on_turn=on_turn)
    state = states[after]
    return None if state is None else codec.from_json(EpisodeState, codec.to_json(state))


@pytest.mark.parametrize("resume", ["replay", "snapshot"])
async def test_a_continued_episode_equals_an_uninterrupted_one(tokenizer: Any, resume: str) -> None:
    for context_turns in (None, 1, 2):
        task = task_of("Count", goal=8, resume=resume, context_turns=context_turns)
        uninterrupted = await runner_of(tokenizer, *ACTIONS).run(task, episode_id="e")
        for after in (1, 2, 3, 4):
            state = await captured(task, tokenizer, after)
            assert state is not None
            continued = await runner_of(tokenizer, *ACTIONS).run(task, episode_id="e", start=state)
            assert not continued.failures and continued.stop_reason == "terminated"
            assert _content(continued) == _content(uninterrupted)
            assert (await episode_return(task, continued)).value == 8.0


def _content(episode: Any) -> list[Any]:
    return [
        [replace(trajectory, turns=()), *((turn.prompt_ids, turn.completion_ids, _results(turn)) for turn in trajectory.turns)]
        for trajectory in episode.trajectories
    ]


def _results(turn: Any) -> list[Any]:
    return [(result.output, result.reward, dict(result.parts)) for result in turn.tool_results]


@pytest.mark.parametrize("limit", [None, 3])
async def test_turns_without_an_action_are_replayed_exactly(tokenizer: Any, limit: int | None) -> None:
    """They include a call that the limit on calls rejected, which a replay must not make."""
    texts = (UNKNOWN, CALL.replace("{", "["), CALL, f"{UNKNOWN}\n{UNKNOWN}", *[CALL] * 3)
    task = task_of("Toll", limits={"turns": 6, "tool_calls": limit})
    states: list[EpisodeState] = []

    async def on_turn(count: int, capture: Any) -> None:
        states.append(codec.from_json(EpisodeState, codec.to_json(await capture())))

    uninterrupted = await runner_of(tokenizer, *texts).run(task, episode_id="e", on_turn=on_turn)
    rewards = [turn.tool_results[-1].reward for turn in uninterrupted.trajectories[0].turns]
    assert rewards == [0, 0, -3, -1, -1, -1] and (await episode_return(task, uninterrupted)).parts == {"no_action": -3.0 if limit else -1.0}
    assert len(states) == (6 if limit else 5)
    for state in states:
        continued = await runner_of(tokenizer, *texts).run(task, episode_id="e", start=state)
        assert _content(continued) == _content(uninterrupted) and continued.failures == uninterrupted.failures


async def test_a_fresh_start_captures_no_state(tokenizer: Any) -> None:
    assert await captured(task_of("Count", resume="restart"), tokenizer, 2) is None
    assert await captured(task_of("Guesses", resume="snapshot"), tokenizer, 2) is None  # it has no snapshot


async def test_a_replay_with_another_result_is_a_fault(tokenizer: Any) -> None:
    task = task_of("Walk", fault="random", limits={"turns": 5})
    states: list[EpisodeState] = []

    async def on_turn(count: int, capture: Any) -> None:
        states.append(await capture())

    await runner_of(tokenizer, "left", "left", "left", "left", "left").run(task, episode_id="e", on_turn=on_turn)
    episode = await runner_of(tokenizer, *["left"] * 5).run(task, episode_id="e", start=states[1])
    (failure,) = episode.failures
    assert failure.blame is Blame.INFRASTRUCTURE and "not deterministic" in failure.message and "resume=restart" in failure.message

"""Ending an episode early must not pay: actions that end the environment's process, and no action."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.config.recipe import TasksConfig
from agentrl.environment import close_environments
from agentrl.environment.returns import episode_return
from agentrl.plugins.parts import Part
from agentrl.records import Blame, Failure, Group, Split
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.rollout.repeats import GENERATE, MIN_OTHERS, PROVOKED, FaultHistory, part_in
from agentrl.task import open_family
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of
from tests.episodes import tokenizer as tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


class Slow(ScriptedPolicy):
    async def generate(self, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0.4)
        return await super().generate(*arguments, **options)


async def played(policy: ScriptedPolicy, tokenizer: Any, world: str, *, groups: int, **options: Any) -> list[Group]:
    """Runs groups of four attempts concurrently."""
    runner = EpisodeRunner(
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=chat_of(tokenizer)),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )
    group_runner = GroupRunner(runner=runner, scorer=episode_return, slots=asyncio.Semaphore(16), group_size=4)
    family = open_family(TasksConfig(family=Part(f"tests.environment.examples:{world}", options)), seed=0)
    return await asyncio.gather(*(group_runner.run_group(n, family.task(Split.TRAIN, n)) for n in range(groups)))


CALL = '<tool_call>\n{"name": "open", "arguments": {"door": 1}}\n</tool_call>'


@pytest.mark.parametrize(("response", "message"), [("I stay here.", "no call"), ("z" * 9000, "ran out of tokens")])
async def test_an_episode_that_ends_without_an_action_scores_at_most_like_the_worst_of_its_group(
    tokenizer: Any, response: str, message: str
) -> None:
    policy = ScriptedPolicy(tokenizer, lambda turn, episode: response if episode.startswith("g000000-1") else CALL)
    (group,) = await played(policy, tokenizer, "Toll", groups=1)
    assert [scored.score.value for scored in group.episodes] == [-3.0] * 4
    assert [[failure.kind for failure in scored.episode.failures] for scored in group.episodes] == [[], ["no_action"], [], []]
    assert message in group.episodes[1].episode.failures[0].message


@pytest.mark.parametrize("response", ["I stay here.", CALL.replace("1", "2"), "z" * 9000])
async def test_a_group_of_episodes_without_an_action_does_not_pass(tokenizer: Any, response: str) -> None:
    """A step costs 1, so their sum of rewards, 0, is above the threshold."""
    policy = ScriptedPolicy(tokenizer, lambda turn, episode: response)
    (group,) = await played(policy, tokenizer, "Toll", groups=1, pass_threshold=-3)
    assert all(-3.001 < scored.score.value < -3 for scored in group.episodes)
    (passing,) = await played(ScriptedPolicy(tokenizer, lambda turn, episode: CALL), tokenizer, "Toll", groups=1, pass_threshold=-3)
    assert [scored.score.value for scored in passing.episodes] == [-3.0] * 4


UNKNOWN = CALL.replace("open", "close")
MALFORMED = {
    "locked": CALL.replace("1", "2"),
    "not JSON": CALL.replace("{", "["),
    "not closed": CALL.removesuffix("</tool_call>"),
    "unknown": UNKNOWN,
    "no such argument": CALL.replace("door", "window"),
    "two": f"{UNKNOWN}\n{CALL.replace('{', '[')}",
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_turns_without_an_action_cost_as_much_as_a_step(tokenizer: Any, kind: str) -> None:
    """Turns before the first step are charged with it. An episode of only such turns scores at most like the worst of its group."""
    wrong = MALFORMED[kind]
    scripts = {"0": lambda turn: CALL, "1": lambda turn: wrong if turn < 2 else CALL, "2": lambda turn: wrong if turn == 1 else CALL}
    policy = ScriptedPolicy(tokenizer, lambda turn, episode: scripts.get(episode[8:9], lambda turn: wrong)(turn))
    (group,) = await played(policy, tokenizer, "Toll", groups=1)
    assert [scored.score.value for scored in group.episodes] == [-3.0, -5.0, -4.0, -5.0]
    turns = [[turn.tool_results[-1].reward for turn in scored.episode.trajectories[0].turns] for scored in group.episodes[:3]]
    assert turns == [[-1, -1, -1], [0, 0, -3, -1, -1], [-1, -1, -1, -1]]
    assert [failure.kind for failure in group.episodes[3].episode.failures] == ["no_action"]


async def test_actions_that_end_the_process_are_scored_and_its_other_episodes_are_repeated(tokenizer: Any) -> None:
    """A leap ends the episode before its other steps cost anything, so an exclusion would pay."""
    policy = Slow(tokenizer, lambda turn, episode: "leap" if episode.startswith("g000000-1") and turn == 1 else "walk")
    crashed = await played(policy, tokenizer, "Trap", groups=4)
    assert [[scored.score.value for scored in group.episodes] for group in crashed] == [[-3.0] * 4] * 4
    (failure,) = crashed[0].episodes[1].episode.failures
    assert (failure.blame, failure.kind, failure.stage) == (Blame.POLICY, PROVOKED, "environment")
    assert not any(scored.episode.failures for group in crashed[1:] for scored in group.episodes)


FAULT = Failure(stage="environment", blame=Blame.INFRASTRUCTURE, kind="EnvironmentFault", message="gone", turn=1)


@pytest.mark.parametrize(("part", "blamed"), [(part_in("a:A"), True), (part_in("b:B"), False), (GENERATE, False)])
def test_only_episodes_of_the_same_environment_show_that_it_works(part: str, blamed: bool) -> None:
    record = FaultHistory()
    for number in range(MIN_OTHERS):
        record.record_use("other", f"other {number}", part)
    assert (record.provoked([FAULT] * 3, "own", since=0, environment="a:A") is not None) == blamed


def test_a_crash_caused_by_another_episode_is_never_blamed_on_the_policy() -> None:
    record = FaultHistory()
    for number in range(MIN_OTHERS):
        record.record_use("other", f"other {number}", part_in("a:A"))
    neighbor = Failure(stage="environment", blame=Blame.INFRASTRUCTURE, kind="NeighborCrash", message="gone", turn=1)
    assert record.provoked([neighbor] * 3, "own", since=0, environment="a:A") is None

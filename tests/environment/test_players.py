"""Episodes with several roles: their players, the recorded and trained tokens, and exclusions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.agent import ChatFormat
from agentrl.agent.players import Players
from agentrl.config.recipe import ObjectiveConfig, TasksConfig
from agentrl.environment import close_environments, episode_return
from agentrl.errors import PluginError, RecipeError, ServingError
from agentrl.objective.credit import CountedEpisode, branch_credit
from agentrl.plugins.parts import AGENT, Part, make_part
from agentrl.protocols import Policy
from agentrl.records import Blame, Episode, ScoredEpisode, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.task import open_family
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.policies import ReadingPolicy
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of
from tests.episodes import tokenizer as tokenizer

pytestmark = pytest.mark.slow

KUHN, GAMES = "sandboxes.games:KuhnPoker", "tests.environment.games:"


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


def task_of(ref: str, index: int = 0, **options: Any) -> Task:
    return open_family(TasksConfig(family=Part(ref, options)), seed=0).task(Split.TRAIN, index)


def runner_of(policy: Policy, tokenizer: Any, **options: Any) -> EpisodeRunner:
    return EpisodeRunner(
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        agent=Players(chat=chat_of(tokenizer), **options),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )


async def play(task: Task, policy: Policy, tokenizer: Any, **options: Any) -> Episode:
    return await runner_of(policy, tokenizer, **options).run(task, episode_id="e")


def policy_of(tokenizer: Any, **moves: str) -> ReadingPolicy:
    """Answers by the end of the last observation: `policy_of(tokenizer, pb="b")` calls after pass, bet."""
    return ReadingPolicy(
        tokenizer, lambda context: next(move for end, move in moves.items() if context.rpartition("<|im_end|>")[0].endswith(end))
    )


def history(episode: Episode) -> dict[str, list[tuple[str, str, float | None]]]:
    return {
        trajectory.agent: [(turn.message.content, turn.tool_results[0].output, turn.tool_results[0].reward) for turn in trajectory.turns]
        for trajectory in episode.trajectories
    }


async def test_the_policy_plays_all_roles_each_in_its_own_trajectory(tokenizer: Any) -> None:
    task = task_of(KUHN)
    policy = ReadingPolicy(tokenizer, lambda context: "p" if context.count("moves") == 1 and "moves -" in context else "b")
    episode = await play(task, policy, tokenizer)
    first, second = episode.trajectories
    assert (first.agent, second.agent) == ("first", "second") and {first.stop_reason, second.stop_reason} == {"terminated"}
    assert not episode.failures and [turn.message.content for turn in first.turns] == ["p", "b"]
    gain = first.turns[1].tool_results[0].reward
    assert abs(gain or 0.0) == 2.0
    card = first.prompt[-1].content[5]
    assert history(episode) == {
        "first": [("p", f"card {card} moves pb", 0.0), ("b", "", gain)],
        "second": [("b", "", -(gain or 0.0))],
    }
    score = await episode_return(task, episode)
    assert (score.value, score.branches) == (0.0, (gain, -(gain or 0.0))) and score.parts == {"first": gain, "second": -(gain or 0.0)}
    tokens = [token for turn in first.turns for token in (*turn.prompt_ids, *turn.completion_ids)]
    turns = [("user", f"card {card} moves -"), ("assistant", "p"), ("user", f"card {card} moves pb"), ("assistant", "b")]
    rendered = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in turns], tokenize=False)
    assert tokenizer.decode(tokens) == rendered.rstrip("\n"), "the other role's tokens are not in its context"
    assert all(turn.supports is not None for turn in first.turns), "choices are constrained"


async def test_simultaneous_moves_are_hidden_and_a_role_that_never_acts_has_no_trajectory(tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, lambda turn, episode: "heads")
    episode = await play(task_of(f"{GAMES}Match"), policy, tokenizer)
    assert sorted(trajectory.agent for trajectory in episode.trajectories) == ["matcher", "other"]
    observations = ["round 1: {'matcher': 'heads', 'other': 'heads'}", "round 2: {'matcher': 'heads', 'other': 'heads'}"]
    assert history(episode) == {
        "matcher": [("heads", text, 1.0) for text in observations],
        "other": [("heads", text, -1.0) for text in observations],
    }
    score = await episode_return(task_of(f"{GAMES}Match"), episode)
    assert score.parts == {"matcher": 2.0, "other": -2.0}


@pytest.mark.parametrize("role", ["first", "second"])
async def test_a_script_plays_a_role_without_tokens_and_is_not_trained(tokenizer: Any, role: str) -> None:
    episode = await play(task_of(KUHN), policy_of(tokenizer, **{"-": "b", "p": "b"}), tokenizer, players={role: f"{GAMES}pass_always"})
    trained, scripted = sorted(episode.trajectories, key=lambda trajectory: bool(trajectory.policy))
    assert (trained.policy, scripted.policy, scripted.agent) == ("", f"{GAMES}pass_always", role)
    assert all(turn.completion_ids for turn in trained.turns) and not any(turn.completion_ids or turn.versions for turn in scripted.turns)
    assert episode.trajectories[0] == trained, "the main trajectory is trained"
    score = await episode_return(task_of(KUHN), episode)
    assert score.value == score.parts[trained.agent] == 1.0, "a bet is not called"


class FixedLeague:
    """A league with one past version that records its results."""

    def __init__(self, policy: Policy, fault: Exception | None = None) -> None:
        self.number, self.policy, self.fault, self.results = 7, policy, fault, list[tuple[int, float, int]]()

    @asynccontextmanager
    async def opponent(self) -> AsyncIterator[FixedLeague]:
        if self.fault is not None:
            raise self.fault
        yield self

    def record(self, opponent: int, gain: float, *, version: int) -> None:
        self.results.append((opponent, gain, version))


async def test_a_game_has_a_result_if_a_limit_ends_it_and_none_without_a_move_of_the_policy(tokenizer: Any) -> None:
    league = FixedLeague(ScriptedPolicy(tokenizer, lambda turn, episode: "heads" if episode == "e" else "p"))
    policy = ScriptedPolicy(tokenizer, lambda turn, episode: "heads" if episode == "e" else "z" * 9000, version=9)
    runner = runner_of(policy, tokenizer, opponent="league", share=1.0, league=league)
    for index in range(8):
        await runner.run(task_of(f"{GAMES}Match", index), episode_id="e")
    assert 0 < len(league.results) < 16 and {version for _, _, version in league.results} == {9}
    league.results.clear()
    episode = await runner.run(task_of(KUHN), episode_id="long")
    assert episode.stop_reason == "token_limit" and [gain < 0 for _, gain, _ in league.results] == [True]


async def test_a_past_version_plays_the_other_role_without_staleness_or_training(tokenizer: Any) -> None:
    policy, past = ScriptedPolicy(tokenizer, lambda turn, episode: "b", version=9), ReadingPolicy(tokenizer, lambda context: "p")
    league, roles = FixedLeague(past), set()
    for index in range(8):
        runner = runner_of(policy, tokenizer, opponent="league", share=1.0, league=league)
        episodes = [await runner.run(task_of(KUHN, index), episode_id=f"e{attempt}") for attempt in range(2)]
        assert episodes[0].trajectories[0].agent == episodes[1].trajectories[0].agent, "the attempts at a task agree"
        own, other = episodes[0].trajectories
        roles.add(own.agent)
        assert other.policy == "version 7" and episodes[0].oldest_version == 9
        assert episodes[0].completion_tokens == sum(len(turn.completion_ids) for turn in own.turns)
    assert roles == {"first", "second"} and set(league.results) == {(7, 2.0, 9)}
    prompts = {tokenizer.decode(list(prompt)) for prompt in past.prompts}
    assert all(prompt.startswith("<|im_start|>user\ncard") and prompt.endswith("<|im_start|>assistant\n") for prompt in prompts)


async def test_a_share_of_the_tasks_has_an_opponent(tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, lambda turn, episode: "b")
    agent = runner_of(policy, tokenizer, opponent="league", share=0.3, league=FixedLeague(policy))
    played = [await agent.run(task_of(KUHN, index), episode_id="e") for index in range(60)]
    assert 8 <= sum(any(trajectory.policy for trajectory in episode.trajectories) for episode in played) <= 28


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"players": {"second": f"{GAMES}raises"}}, "the player function of second failed.*ValueError: no idea"),
        ({"players": {"second": f"{GAMES}nonsense"}}, "returned 'sideways', which is not an allowed action"),
        ({"opponent": "league", "share": 1.0, "league": FixedLeague(None, ServingError("it died"))}, "it died"),  # type: ignore[arg-type]
    ],
)
async def test_a_failing_opponent_is_an_infrastructure_fault(tokenizer: Any, options: dict[str, Any], message: str) -> None:
    episode = await play(task_of(KUHN), ScriptedPolicy(tokenizer, lambda turn, _: "b"), tokenizer, **options)
    (failure,) = episode.failures
    assert failure.blame is Blame.INFRASTRUCTURE and re.search(message, failure.message)
    assert episode.left_out


class DyingPolicy:
    async def generate(self, *arguments: Any, **named: Any) -> Any:
        raise ServingError("connection refused")


async def test_an_opponent_that_dies_in_a_game_excludes_it_and_records_no_result(tokenizer: Any) -> None:
    league = FixedLeague(DyingPolicy())
    policy = ScriptedPolicy(tokenizer, lambda turn, _: "b")
    episode = await play(task_of(KUHN), policy, tokenizer, opponent="league", share=1.0, league=league)
    assert episode.left_out and not league.results and "connection refused" in episode.failures[0].message


async def test_a_game_that_breaks_the_contract_is_excluded(tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, lambda turn, _: "heads")
    for fault in ("no role", "unknown", "text", "twice", "ends silently", "reward of an unknown role", "nan", "pair"):
        episode = await play(task_of(f"{GAMES}Faulty", fault=fault), policy, tokenizer)
        assert episode.left_out and episode.failures[0].stage == "environment", fault


async def test_a_forbidden_move_forfeits_the_game(tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, lambda turn, _: "heads")
    episode = await play(task_of(f"{GAMES}Faulty", fault="forbids"), policy, tokenizer)
    assert not episode.left_out and episode.stop_reason == "forfeited"
    assert (await episode_return(task_of(f"{GAMES}Match"), episode)).parts == {"matcher": -1.0, "other": -1.0}


async def test_a_cut_move_and_a_reached_limit_forfeit_the_game(tokenizer: Any) -> None:
    """Running out of tokens or turns must not be better than losing."""
    policy = ScriptedPolicy(tokenizer, lambda turn, _: "p" if not turn else "b")
    task = task_of(KUHN, limits={"turn_tokens": 1})
    episode = await play(task, policy, tokenizer)
    assert history(episode) == {"first": [("p", "", -2.0)]} and episode.stop_reason == "token_limit"
    episode = await play(task_of(KUHN, limits={"turns": 2}), policy, tokenizer)
    assert episode.stop_reason == "turn_limit"
    assert (await episode_return(task, episode)).parts == {"first": -2.0, "second": 2.0}


async def test_a_past_version_without_room_forfeits_the_game(tokenizer: Any) -> None:
    past = ReadingPolicy(tokenizer, lambda context: "p")
    league, policy = FixedLeague(past), ScriptedPolicy(tokenizer, lambda turn, _: "b", version=9)
    options: dict[str, Any] = {"players": {"echo": "league"}, "league": league}
    for room in (4096, 120):
        past.prompts.clear()
        episode = await play(task_of(f"{GAMES}Echo", limits={"episode_tokens": room}), policy, tokenizer, **options)
        assert not episode.failures and episode.stop_reason == ("terminated" if room == 4096 else "forfeited")
        assert all(len(prompt) < room for prompt in past.prompts)
    assert [gain for _, gain, _ in league.results] == [0.0, 2.0]


@pytest.mark.parametrize("role", ["first", "second"])
async def test_a_task_without_room_for_the_first_move_is_a_fault_of_the_task(tokenizer: Any, role: str) -> None:
    """Whoever has the first move, neither the policy nor a past version gets a reward."""
    league = FixedLeague(ScriptedPolicy(tokenizer, lambda turn, _: "p"))
    policy = ScriptedPolicy(tokenizer, lambda turn, _: "p", version=9)
    task = task_of(KUHN, limits={"episode_tokens": 16})
    episode = await play(task, policy, tokenizer, players={role: "league"}, league=league)
    assert [failure.blame for failure in episode.failures] == [Blame.TASK] and episode.left_out and not league.results


async def test_an_unreadable_move_forfeits_the_game(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that cannot be read must not be better than losing."""
    runner, parse = runner_of(policy_of(tokenizer, **{"-": "p", "p": "b"}), tokenizer), ChatFormat.parse

    def parse_passes(chat: ChatFormat, token_ids: Any, *arguments: Any) -> Any:
        parsed = parse(chat, token_ids, *arguments)
        if parsed.answer == "b":
            raise ValueError("no such token")
        return parsed

    monkeypatch.setattr(ChatFormat, "parse", parse_passes)
    episode = await runner.run(task_of(KUHN), episode_id="e")
    assert not episode.left_out and episode.stop_reason == "forfeited"
    assert [(failure.kind, failure.blame) for failure in episode.failures] == [("not_taken", Blame.POLICY)]
    assert (await episode_return(task_of(KUHN), episode)).parts == {"first": 2.0, "second": -2.0}


@pytest.mark.parametrize(
    ("ref", "options", "problem"),
    [
        (KUHN, {"players": {"third": "current"}}, "no role 'third'"),
        (KUHN, {"players": {"first": f"{GAMES}heads", "second": f"{GAMES}heads"}}, "the trained policy plays no role"),
        (
            KUHN,
            {"players": {"first": f"{GAMES}heads", "second": f"{GAMES}heads"}, "opponent": f"{GAMES}heads", "share": 1.0},
            "the trained policy plays no role",
        ),
        ("tests.environment.examples:Guess", {}, "cannot play an environment without roles"),
    ],
)
async def test_options_that_do_not_fit_the_environment_are_an_error(tokenizer: Any, ref: str, options: Any, problem: str) -> None:
    episode = await play(task_of(ref), ScriptedPolicy(tokenizer, lambda turn, _: "b"), tokenizer, **options)
    assert problem in episode.failures[0].message and episode.failures[0].blame is Blame.TASK


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 0.7}, {"opponent": "current"}, {"players": {"a": "tests.chats:nothing"}}])
def test_invalid_options_are_errors(tokenizer: Any, options: Any) -> None:
    with pytest.raises(PluginError):
        Players(chat=chat_of(tokenizer), **options)


async def test_each_role_has_its_own_baseline(tokenizer: Any) -> None:
    """Over four attempts at one deal, each role is compared with itself: the advantages of a role add up to zero."""
    task, scored = task_of(KUHN), []
    for attempt in range(4):
        policy = ScriptedPolicy(tokenizer, lambda turn, _, bets=attempt % 2: "b" if bets else "p")
        episode = await runner_of(policy, tokenizer).run(task, episode_id=f"e{attempt}")
        scored.append(ScoredEpisode(episode=episode, score=await episode_return(task, episode)))
    objective = ObjectiveConfig(advantage="rloo", credit="verifier")  # type: ignore[arg-type]
    rollouts = [CountedEpisode(scored=each, score=each.score.value or 0.0, advantage=0.0) for each in scored]
    credit = branch_credit(rollouts, objective)
    for number in (0, 1):
        values = [credit[each.episode.id][number][0] for each in scored]
        assert sum(values) == pytest.approx(0.0) and max(values) > 0.5
    branches = [dataclasses.asdict(each.score)["branches"] for each in scored]
    assert all(sum(pair) == 0 for pair in branches)


def test_a_recipe_builds_the_agent_and_declares_whether_it_needs_a_league(tokenizer: Any) -> None:
    from recipes.kuhn_poker import recipe

    agent = make_part(AGENT, recipe.rollout.agent, chat=chat_of(tokenizer), **recipe.rollout.agent_settings)
    assert isinstance(agent, Players) and agent.opponent == "league" and recipe.rollout.needs_league
    assert not recipe.but({"rollout.agent": "players"}).rollout.needs_league
    for key, value in (("rollout.compaction", 0.5), ("rollout.checkpoint_turns", True)):
        with pytest.raises(RecipeError, match="does nothing with agent=players"):
            recipe.but({key: value})

"""The policy as the user of a conversation: its context, trained tokens, ends, failures, resumption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import ChatFormat
from agentrl.agent.agent_environment import check_environment
from agentrl.agent.policy_roles import UNTRAINED
from agentrl.environment import close_environments, open_environment
from agentrl.environment.dialogue import GREETING, INSTRUCTIONS, LEFT, POLICY
from agentrl.errors import PluginError, ServingError, UserError
from agentrl.objective.samples import counted_samples
from agentrl.records import Blame, EnvironmentSpec, Episode, EpisodeState, Group, Limits, Score, ScoredEpisode, Task, codec
from agentrl.records.group import sampled_tokens
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ReadingPolicy
from tests.agent.test_template_probe import FORGETS, make_tokenizer
from tests.chats import chat_of
from tests.environment.test_dialogue import ADD, HERE, outputs, runner_of, task_of
from tests.episodes import restarting
from tests.episodes import tokenizer as tokenizer

AGENT_TEXTS, USER_TEXTS = ("hi", ADD, "well?", "bye"), ("Yes.", "<think>\nhm\n</think>\n\nNo.", "So long. [END]")


@pytest.fixture(autouse=True)
async def environments_closed() -> AsyncIterator[None]:
    yield
    await close_environments()


def talk_of(trained: bool = False, resume: str = "snapshot", limits: Limits | None = None) -> Task:
    task = task_of(backend=f"{HERE}Counter")
    assert task.environment is not None
    options = {**task.environment.options, "user": POLICY, "train_user": trained}
    return replace(task, environment=replace(task.environment, options=options, resume=resume), limits=limits or task.limits)


def runner(tokenizer: Any, agent: Sequence[str] = AGENT_TEXTS, user: Sequence[str] = USER_TEXTS) -> EpisodeRunner:
    """Runs episodes with `policy`."""
    return replace(runner_of(tokenizer), policy=policy(tokenizer, agent, user))


def policy(tokenizer: Any, agent: Sequence[str], user: Sequence[str]) -> ReadingPolicy:
    """A policy whose texts as agent and as user depend on the number of its earlier turns. A text `dies` is a server that fails."""

    def next_text(context: str) -> str:
        plays_user = INSTRUCTIONS[:20] in context
        text = (user if plays_user else agent)[context.count("<|im_start|>assistant\n") - (2 if plays_user else 1)]
        if text == "dies":
            raise ServingError("connection refused")
        return text

    return ReadingPolicy(tokenizer, next_text)


@pytest.mark.parametrize("trained", [False, True])
async def test_the_user_has_a_context_of_its_own_in_exact_tokens(tokenizer: Any, trained: bool) -> None:
    episode_runner = runner(tokenizer, ("hi<|im_end|>", *AGENT_TEXTS[1:]))
    episode = await episode_runner.run(talk_of(trained), episode_id="e")
    assert not episode.failures and outputs(episode) == ["Yes.", "count 1", "No.", "So long."] and episode.stop_reason == "terminated"
    main, user = episode.trajectories
    assert (main.agent, main.policy, user.agent, user.policy) == ("main", "", "user", "" if trained else UNTRAINED)
    tokens = [token for turn in user.turns for token in (*turn.prompt_ids, *turn.completion_ids)]
    texts = [GREETING, "Hello.", "hi< |im_end|>", "Yes.", "well?", USER_TEXTS[1], "bye", USER_TEXTS[2]]
    roles = ["user", "assistant"] * 4
    conversation = [{"role": "system", "content": f"{INSTRUCTIONS}Ana"}]
    conversation += [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(conversation, tokenize=False).rstrip("\n")
    assert isinstance(episode_runner.policy, ReadingPolicy)
    contexts = [tokenizer.decode(list(prompt)) for prompt in episode_runner.policy.prompts]
    assert all(("Ana" in context) == (GREETING in context) for context in contexts), "only the user's contexts contain its brief"
    assert [turn.message.content for turn in user.turns] == list(USER_TEXTS)


@pytest.mark.parametrize("trained", [False, True])
async def test_the_tokens_of_the_user_are_trained_only_on_request(tokenizer: Any, trained: bool) -> None:
    episode = await runner(tokenizer).run(talk_of(trained), episode_id="e")
    scored = ScoredEpisode(episode=episode, score=Score(value=1.0))
    samples = counted_samples([Group(index=0, task_id="t", task_key="k", episodes=(scored,))])
    texts = [
        tokenizer.decode([token for token, counts in zip(one.token_ids, one.loss_mask, strict=True) if counts]).split("<|im_end|>")[:-1]
        for one in samples
    ]
    assert texts == [list(AGENT_TEXTS), list(USER_TEXTS)][: len(samples)] and len(samples) == 1 + trained
    assert sum(sum(one.loss_mask) for one in samples) == sampled_tokens([scored]) == episode.completion_tokens
    assert any(turn.versions for turn in episode.trajectories[1].turns) == trained, "only trained tokens have staleness"


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("resume", ["snapshot", "replay"])
async def test_a_resumed_conversation_samples_nothing_again(tokenizer: Any, trained: bool, resume: str) -> None:
    task, states = talk_of(trained, resume, Limits(turns=16, tool_calls=1)), list[EpisodeState]()

    async def on_turn(count: int, capture: Any) -> None:
        states.append(await capture())

    full = await runner(tokenizer).run(task, episode_id="e", on_turn=on_turn)
    assert len(states) == 3
    for state in states:
        resuming = runner(tokenizer)
        resumed = await resuming.run(task, episode_id="e", start=codec.from_json(EpisodeState, codec.to_json(state)))
        assert tokens_of(resumed) == tokens_of(full) and outputs(resumed) == outputs(full) and not resumed.failures
        assert isinstance(resuming.policy, ReadingPolicy) and len(resuming.policy.prompts) == 7 - state.turn_count
        branch = await runner(tokenizer).run(task, episode_id="b", start=state)
        assert tokens_of(branch) == tokens_of(full) and sum(len(one.inherited) for one in branch.trajectories) == state.turn_count


def tokens_of(episode: Episode) -> list[Any]:
    return [(one.agent, one.policy, [(turn.prompt_ids, turn.completion_ids) for turn in one.turns]) for one in episode.trajectories]


@pytest.mark.parametrize(
    ("text", "limits", "stop_reason"),
    [
        (" ", {}, "terminated"),
        (ADD, {}, "terminated"),
        ("z" * 300, {"turn_tokens": 100}, "token_limit"),
        ("Yes.", {"turns": 3}, "turn_limit"),
        ("Yes.", {"turns": 1}, "turn_limit"),
        ("Yes.", {"episode_tokens": 600}, "token_limit"),
    ],
)
async def test_a_user_without_a_text_leaves_and_the_episode_counts(tokenizer: Any, text: str, limits: Any, stop_reason: str) -> None:
    episode = await runner(tokenizer, ["hi"] * 9, [text] * 9).run(talk_of(limits=Limits(**{"turns": 16, **limits})), episode_id="e")
    assert not episode.failures and not episode.left_out and episode.stop_reason == stop_reason
    assert outputs(episode)[-1] == LEFT


async def test_a_server_failure_in_a_user_turn_is_an_infrastructure_failure(tokenizer: Any) -> None:
    episode = await runner(tokenizer, user=["dies"]).run(talk_of(), episode_id="e")
    (failure,) = episode.failures
    assert episode.left_out and (failure.blame, failure.stage) == (Blame.INFRASTRUCTURE, "generate")


async def test_a_slow_server_in_a_user_turn_is_an_infrastructure_failure(tokenizer: Any) -> None:
    async def answer_late(context: str) -> str:
        await asyncio.sleep(30.0 if GREETING in context else 0.0)
        return "hi"

    episode_runner = replace(runner_of(tokenizer), policy=ReadingPolicy(tokenizer, answer_late))
    episode = await episode_runner.run(talk_of(limits=Limits(turns=16, wall_s=0.3)), episode_id="e")
    assert episode.left_out and episode.failures[0].blame is Blame.INFRASTRUCTURE


@pytest.mark.parametrize("trained", [False, True])
async def test_a_context_of_the_user_that_restarts_stays_untrained(trained: bool) -> None:
    tokenizer = make_tokenizer(FORGETS)
    texts = ("hi", "well?", "so?", "bye"), ("<think>\nhm\n</think>\n\nYes.", "No.", "Why?", "So long. [END]")
    episode_runner = restarting(policy(tokenizer, *texts), tokenizer)
    episode = await episode_runner.run(talk_of(trained), episode_id="e")
    user_trajectories = [trajectory for trajectory in episode.trajectories if trajectory.agent == "user"]
    assert not episode.failures and [trajectory.stop_reason for trajectory in user_trajectories] == ["restarted", "terminated"]
    assert {trajectory.policy for trajectory in user_trajectories} == {"" if trained else UNTRAINED}
    assert "hm" not in tokenizer.decode(list(user_trajectories[1].turns[0].prompt_ids)) and outputs(episode)[-1] == "So long."


async def test_invalid_options_and_agents_without_a_user_raise() -> None:
    spec = task_of().environment
    assert spec is not None
    with pytest.raises(PluginError, match="train_user requires user=policy"):
        await open_environment(EnvironmentSpec(ref=spec.ref, options={**spec.options, "train_user": True}))
    environment = await open_environment(EnvironmentSpec(ref=spec.ref, options={**spec.options, "user": POLICY}))
    await environment.reset()
    with pytest.raises(PluginError, match="only if the agent supports it"):
        await environment.step("hi")


async def test_a_template_that_cannot_render_the_users_context_raises_before_the_run(tokenizer: Any) -> None:
    await check_environment(talk_of(), chat_of(tokenizer))
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(UserError, match="no system"):
        await check_environment(talk_of(), ChatFormat(make_tokenizer(refuses + str(tokenizer.chat_template))))

"""Thinking that ends at a bound: exact tokens, and only sampled tokens are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.objective.branches import captured_tokens
from agentrl.objective.samples import counted_samples
from agentrl.records import Blame, Episode, EpisodeState, Group, Limits, Message, Score, ScoredEpisode, Task, Turn, codec
from agentrl.records.sampling import Sampling, Supports
from agentrl.rollout import CaptureState, EpisodeRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of
from tests.rollout.test_group import PYTHON, SUBMIT

THINKING_TOKENS = 40
MARK = "\n</think>\n\n"
LONG = "<think>\n" + "hm " * 40


@pytest.fixture(scope="module")
def thinker() -> Any:
    tokenizer = byte_tokenizer()
    content = "{{ ('<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content else '') + m.content }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}{% for", content + "{% for")
    return tokenizer


def runner(tokenizer: Any, script: Any, *, top_k: int = 0) -> EpisodeRunner:
    return EpisodeRunner(
        policy=ScriptedPolicy(tokenizer, script),
        sandboxes=ScriptedSandboxes(printing("3")),
        agent=TurnLoop(chat=chat_of(tokenizer)),
        sampling=Sampling(top_k=top_k, supports=top_k > 0),
        max_model_len=4096,
        request_timeout_s=60.0,
    )


def bounded(task: Task, tokens: int | None = THINKING_TOKENS) -> Task:
    return replace(task, limits=replace(task.limits, thinking_tokens=tokens))


def text_of(tokenizer: Any, turn: Turn) -> str:
    return str(tokenizer.decode(list(turn.completion_ids)))


def text_after_bound(tokenizer: Any, text: str) -> str:
    """Returns the text without the tokens up to the bound on thinking."""
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[THINKING_TOKENS:]))


def group_of(episode: Episode) -> Group:
    return Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=1.0)),))


@pytest.mark.parametrize("top_k", [0, 3])
async def test_thinking_ends_at_its_bound_and_the_end_mark_is_not_trained(thinker: Any, task: Task, top_k: int) -> None:
    """The first turn thinks for too long, and the second stops in time."""

    def script(turn: int, episode: str) -> str:
        after = episode.endswith(".answer")
        if turn == 0:
            return PYTHON if after else LONG
        response = f"<think>\nhm\n</think>\n\n{SUBMIT}"
        return text_after_bound(thinker, response) if after else response

    episode_runner = runner(thinker, script, top_k=top_k)
    episode = await episode_runner.run(bounded(task), episode_id="e")
    assert episode.answer == "3" and not episode.failures
    first, second = episode.trajectories[0].turns
    mark = thinker.encode(MARK, add_special_tokens=False)
    assert text_of(thinker, first) == f"{LONG[:THINKING_TOKENS]}{MARK}{PYTHON}<|im_end|>" and first.finish_reason == "stop"
    assert first.forced == tuple(range(THINKING_TOKENS, THINKING_TOKENS + len(mark))) and first.message.tool_calls[0].name == "python"
    assert first.message.content.endswith("</think>") and first.tool_results[0].ok
    prompts = episode_runner.policy.prompts  # type: ignore[attr-defined]
    assert prompts[1] == (*first.prompt_ids, *first.completion_ids[: THINKING_TOKENS + len(mark)])
    assert prompts[2][: len(first.prompt_ids + first.completion_ids)] == first.prompt_ids + first.completion_ids
    assert second.forced == ()

    group = group_of(episode)
    assert codec.from_json(Group, codec.to_json(group)) == group
    (sample,) = counted_samples([group])
    trained = [token for token, trains in zip(sample.token_ids, sample.loss_mask, strict=True) if trains]
    turns = [[token for position, token in enumerate(turn.completion_ids) if position not in turn.forced] for turn in (first, second)]
    assert trained == [*turns[0], *turns[1]] and len(trained) == episode.completion_tokens == captured_tokens([group], ())
    at = len(first.prompt_ids) + THINKING_TOKENS
    span = slice(at, at + len(mark))
    assert sample.token_ids[span] == tuple(mark) and set(sample.versions[span]) == {-1} and set(sample.logprobs[span]) == {0.0}
    assert (sample.supports is not None) == (top_k > 0)
    if isinstance(sample.supports, Supports):
        assert [bool(row) for row in sample.supports.rows] == list(sample.loss_mask), "the mark has no support"


@pytest.mark.parametrize(
    ("text", "budget", "requests"),
    [
        (f"<think>\nhm\n</think>\n\nThe answer is {'long ' * 10}", 200, 2),  # it continues after its thinking
        ("No thought: " + "word " * 10, 200, 2),
        ("short", 200, 1),
        (LONG, THINKING_TOKENS + 5, 1),  # the mark would not fit, so the turn ends at its budget
    ],
)
async def test_nothing_is_forced_on_a_turn_that_has_stopped_thinking(
    thinker: Any, task: Task, text: str, budget: int, requests: int
) -> None:
    limits = replace(task.limits, turn_tokens=budget)
    thinking_runner = runner(thinker, lambda turn, name: text_after_bound(thinker, text) if name.endswith(".answer") else text)
    turn = (await thinking_runner.run(bounded(replace(task, limits=limits)), episode_id="e")).trajectories[0].turns[0]
    plain = runner(thinker, lambda turn, name: text)
    free = (await plain.run(replace(task, limits=limits), episode_id="e")).trajectories[0].turns[0]
    assert (turn.completion_ids, turn.forced, turn.finish_reason) == (free.completion_ids, (), free.finish_reason)
    assert len(thinking_runner.policy.prompts) == requests  # type: ignore[attr-defined]


async def test_a_branch_continues_after_a_turn_whose_thinking_was_ended(thinker: Any, task: Task) -> None:
    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None
        states.append(codec.from_json(EpisodeState, codec.to_json(state)))

    def script(turn: int, name: str) -> str:
        after = name.endswith(".answer")
        if turn == 0:
            return PYTHON if after else LONG
        return text_after_bound(thinker, SUBMIT) if after else SUBMIT

    episode_runner = runner(thinker, script)
    stem = await episode_runner.run(bounded(task), episode_id="e", on_turn=on_turn)
    branch = await episode_runner.run(bounded(task), episode_id="b", start=states[0])
    (first, _), (inherited, _) = stem.trajectories[0].turns, branch.trajectories[0].turns
    assert first == inherited and first.forced and branch.completion_tokens < stem.completion_tokens
    assert episode_runner.policy.prompts[-1][: len(first.prompt_ids + first.completion_ids)] == first.prompt_ids + first.completion_ids  # type: ignore[attr-defined]


async def test_an_unenforceable_bound_is_a_task_fault(tokenizer: Any, task: Task) -> None:
    episode = await runner(tokenizer, lambda turn, name: SUBMIT).run(bounded(task), episode_id="e")
    (failure,) = episode.failures
    assert failure.blame is Blame.TASK and "limits.thinking_tokens=40 requires a chat template" in failure.message
    with pytest.raises(ValueError, match="leaves no tokens for an answer"):
        Limits(turn_tokens=64, thinking_tokens=64)


def test_an_unset_thinking_limit_does_not_change_the_task_key(task: Task) -> None:
    assert bounded(task, None).key == task.key != bounded(task).key


def test_invalid_positions_of_forced_tokens_raise_an_error() -> None:
    turn = Turn(
        prompt_ids=(1,), completion_ids=(), logprobs=(), versions=(), message=Message(role="assistant", content=""), finish_reason="stop"
    )
    for forced in ((0,), (1, 0), (-1,), (2,)):
        with pytest.raises(ValueError, match="forced"):
            replace(turn, forced=forced)

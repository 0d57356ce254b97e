"""For any agent, every sampled token is in exactly one sample, with the context that it was sampled in."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.config import Recipe, build
from agentrl.config.rollout import DelegationConfig
from agentrl.objective import assemble
from agentrl.records import Completion, EpisodeState, Group, Limits, SamplingParams, Score, ScoredEpisode, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import CaptureState, EpisodeRunner
from agentrl.testing import ReadingPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of

MODES = ("episode", "branches", "roles", "verifier", "counterfactual", "siblings")


class RecordingPolicy(ReadingPolicy):
    """Samples random text, and records for each token a unique logprob and its context."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        super().__init__(tokenizer, self._random_text)
        self.random = random.Random(seed)
        self.contexts: dict[float, tuple[tuple[int, ...], int]] = {}  # logprob -> context, token

    def _random_text(self, context: str) -> str:
        calls = [("delegate", {"task": "look " * self.random.randint(1, 3)}), ("python", {"code": "1"}), ("delegate", {}), ("nothing", {})]
        texts = ["", "done", "x" * 70, "<tool_call>{", "".join(self._call(*call) for call in self.random.choices(calls, (8, 6, 1, 1), k=2))]
        return self.random.choices(texts, (1, 3, 1, 1, 9))[0]

    def _call(self, name: str, arguments: Any) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        completion = await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        logprobs = []
        for index, token in enumerate(completion.token_ids):
            logprobs.append(-1.0 - len(self.contexts))
            self.contexts[logprobs[-1]] = ((*prompt_ids, *completion.token_ids[:index]), token)
        return replace(completion, logprobs=tuple(logprobs))


def recipe(credit: str) -> Recipe:
    data = {"name": "t", "policy": {"model": "m", "max_model_len": 4096}, "tasks": {"family": "a:b"}, "objective": {"credit": credit}}
    rollout = {"agent": "delegating", "group": {"branches": 2}}
    return build({**data, "rollout": rollout, "learner": {"max_tokens_per_microbatch": 16384}})


async def random_group(policy: RecordingPolicy, task: Task) -> Group:
    """Returns a group of two attempts, and a third that starts from a state of the first."""
    runner = EpisodeRunner(
        agent=TurnLoop(
            chat=chat_of(policy.tokenizer),
            delegation=DelegationConfig(depth=2, total=6, turns=4),
            compaction=0.64,
        ),
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("y" * 40)),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
    )
    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        states.extend(state for state in [await capture()] if state is not None)

    episodes = [await runner.run(task, episode_id=name, on_turn=on_turn if name == "a" else None) for name in "ab"]
    if states:
        episodes.append(await runner.run(task, episode_id="c", start=policy.random.choice(states)))
    scored = []
    for number, episode in enumerate(episodes):
        count = len(episode.trajectories)
        branch_scores = [(None, *(policy.random.random() for _ in range(count - 1))) for _ in range(2)]
        scored.append(ScoredEpisode(episode=episode, score=Score(value=0.3 * number, branches=branch_scores[0], without=branch_scores[1])))
    return Group(index=0, task_id=task.id, task_key=task.key, episodes=tuple(scored))


async def test_trees_at_their_limits_have_no_failure(task: Task, tokenizer: Any) -> None:
    for seed, all_tokens in enumerate((500, 900, 1300, 2000, 3000, 4500)):
        limits = Limits(turns=16, turn_tokens=200, episode_tokens=700, all_tokens=all_tokens)
        group = await random_group(RecordingPolicy(tokenizer, seed), replace(task, tools=("python",), limits=limits))
        for episode in (scored.episode for scored in group.episodes):
            assert not episode.left_out and not episode.failures, episode.failures


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_every_sampled_token_is_in_exactly_one_sample(task: Task, tokenizer: Any) -> None:
    wide = replace(task, tools=("python",), limits=Limits(turns=16, turn_tokens=200, episode_tokens=700))
    ends: set[tuple[str, str]] = set()
    for seed in range(8):
        policy = RecordingPolicy(tokenizer, seed)
        group = await random_group(policy, wide)
        assert not any(scored.episode.left_out for scored in group.episodes)
        ends |= {(one.agent, one.stop_reason) for scored in group.episodes for one in scored.episode.trajectories}
        for mode in MODES if seed == 0 else MODES[seed % len(MODES) :][:1]:
            batch = assemble(0, [group], recipe(mode)).batch
            trained: list[float] = []
            for sample in batch.samples:
                for index in (index for index, trains in enumerate(sample.loss_mask) if trains):
                    context, token = policy.contexts[sample.logprobs[index]]
                    assert sample.token_ids[index] == token and sample.token_ids[:index] == context, "context as sampled"
                    trained.append(sample.logprobs[index])
            assert len(trained) == len(set(trained)) and set(trained) == set(policy.contexts), f"seed {seed}, credit {mode}"
            assert batch.denominator == len(trained) == sum(scored.episode.completion_tokens for scored in group.episodes)
    reached = {("summary", "rejected"), ("summary", "summarized"), ("main", "compacted"), ("worker", "answered"), ("worker", "turn_limit")}
    assert reached <= ends, "the trees cover all kinds of failures"

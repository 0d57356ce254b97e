"""A rollout function for GRPOTrainer that runs the tool calls of all episodes concurrently, which TRL's tool loop does not.

TRL's loop runs the calls of one episode after those of another. A user can replace it with a rollout function (`rollout_func`,
experimental in 1.16). This one combines agentrl's episodes with TRL's generation: a turn of all episodes is one padded batch, then their
calls run concurrently, then the next turn starts. With it the comparison includes the fastest loop that a TRL user could write.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.agent import TurnLoop
from agentrl.records import Completion, SamplingParams, ScoredEpisode, VersionSpan
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner, GroupRunner
from benchmarks.contest.environment import Host

_NEVER_S = 3600.0  # in effect no deadline: generating a large batch takes long


@dataclass(slots=True)
class Request:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    answer: asyncio.Future[Completion]


class Waiting:
    """A policy that waits until every running episode has requested a completion. `batches` then receives all requests."""

    def __init__(self, playing: int) -> None:
        self.batches: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()  # an empty batch: the last episode is over
        self._playing = playing
        self._requests: list[Request] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        request = Request(tuple(prompt_ids), params, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._hand_over()
        return await request.answer

    def over(self) -> None:
        """Ends one episode, which requests no more completions."""
        self._playing -= 1
        self._hand_over()

    def _hand_over(self) -> None:
        if len(self._requests) == self._playing:
            requests, self._requests = self._requests, []
            self.batches.put(requests)


class Together:
    """Returns the rollout function. A prompt's first message contains the index of its group."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __call__(self, prompts: list[list[dict[str, Any]]], trainer: Any) -> dict[str, Any]:
        policy = Waiting(len(prompts))
        playing = self._host.submit(self._play([int(prompt[0]["group"]) for prompt in prompts], policy))
        began, generating_s = time.monotonic(), 0.0
        while batch := policy.batches.get():
            started = time.monotonic()
            sampled, _ = trainer._generate_single_turn([list(request.prompt_ids) for request in batch], None, {}, 1)
            generating_s += time.monotonic() - started
            self._host.run(_answered(batch, sampled, self._host.chat.stop_token_ids))
        scored = playing.result()
        self._host.tool_s += time.monotonic() - began - generating_s
        return rows(scored, end=self._host.chat.stop_token_ids[0])

    async def _play(self, groups: Sequence[int], policy: Waiting) -> list[ScoredEpisode]:
        recipe = self._host.recipe
        runner = EpisodeRunner(
            agent=TurnLoop(chat=self._host.chat),
            policy=policy,
            sandboxes=self._host.opened,
            sampling=Sampling(temperature=recipe.rollout.sampling.temperature),
            max_model_len=recipe.policy.max_model_len,
            request_timeout_s=_NEVER_S,
        )
        slots = asyncio.Semaphore(len(groups))
        games = GroupRunner(runner=runner, scorer=self._host.scorer, slots=slots, group_size=1)

        async def run_episode(number: int, group: int) -> ScoredEpisode:
            task = self._host.task(group)
            patient = replace(task, limits=replace(task.limits, wall_s=_NEVER_S))  # a lock-step turn waits for the slowest
            try:
                return await games.run_episode(patient, name=f"g{group:06d}-{number}")
            finally:
                policy.over()

        scored = await asyncio.gather(*(run_episode(number, group) for number, group in enumerate(groups)))
        self._host.faults += sum(episode.score.value is None for episode in scored)
        return scored


def rows(scored: Sequence[ScoredEpisode], *, end: int) -> dict[str, Any]:
    """Returns a batch of episodes for TRL: ids of prompts and completions, masks of sampled completion tokens, and scores.

    An episode without a turn is one masked token `end`.
    """
    batch: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "score": []}
    for scored_episode in scored:
        turns = scored_episode.episode.trajectories[0].turns
        ids, mask = [end], [0]
        if turns:
            ids, mask = list(turns[0].completion_ids), [1] * len(turns[0].completion_ids)
        for turn in turns[1:]:
            ids += (*turn.prompt_ids, *turn.completion_ids)
            mask += [0] * len(turn.prompt_ids) + [1] * len(turn.completion_ids)
        batch["prompt_ids"].append(list(turns[0].prompt_ids) if turns else [end])
        batch["completion_ids"].append(ids)
        batch["env_mask"].append(mask)
        batch["score"].append(scored_episode.score.value)
    return {**batch, "logprobs": None}


async def _answered(batch: Sequence[Request], sampled: Sequence[Sequence[int]], stop: tuple[int, ...]) -> None:
    """Gives every episode its sampled tokens, up to its `max_tokens`."""
    for request, tokens in zip(batch, sampled, strict=True):
        ids = tuple(tokens[: request.params.max_tokens])
        ended = bool(ids) and ids[-1] in stop
        spans = (VersionSpan(version=0, start=0, end=len(ids)),)
        completion = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), versions=spans, finish_reason="stop" if ended else "length")
        if not request.answer.done():
            request.answer.set_result(completion)

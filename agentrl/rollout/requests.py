"""Sends one episode's requests to the policy, enforces their deadlines, and continues requests that are cut off.

A turn may need several requests. A long request is cut off and continued from the exact tokens so far, so that a stall is detected while it
happens. Only `Limits.wall_s` shortens the policy's output; server settings never do.

A turn with bounded thinking is sampled up to the bound, then the model's end mark is appended if the model is still thinking, and then the
rest is sampled. The tokens of the end mark are part of the completion, because the model reads them, but they are not sampled.
`Completion.forced` lists these tokens, and the learner treats them as context.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from agentrl.base.loop_lag import StallCount
from agentrl.errors import ServingError, TaskError
from agentrl.protocols import Policy
from agentrl.records import CUT, Blame, Completion, Failure, SamplingParams, Task, VersionSpan
from agentrl.records.limits import Thinking
from agentrl.records.sampling import Supports
from agentrl.rollout.faults import infrastructure_fault
from agentrl.rollout.pace import (
    FIRST_S,
    LOST_SHARE,
    REQUESTS_PER_EPISODE,
    SLOW_FACTOR,
    OutOfTime,
    Pace,
    Reading,
    SamplingTime,
    blame_for_timeout,
    fetch_reserve_s,
)

SLOW_SERVER = "slow_server"
DRIVER_STALLED = "driver_stalled"
WALL_LIMIT = "wall_limit"
ADVICE = "raise Limits.wall_s or serving.threads, or lower rollout.concurrency; --resume accepts serving.* and rollout.concurrency"
ANSWER = ".answer"
"""Suffix of the request id for the part of a turn after the bound."""


class SlowServer(ServingError):
    """Error: slow servers cost one turn at least `serving.request_timeout_s`."""


def loop_time() -> float:
    """Returns the event loop's time, which tests can replace. If no loop is running, returns the time of the monotonic clock."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


@dataclass(slots=True)
class TimedExternalRequest:
    """A request that the agent sends itself. The agent may request `most` tokens, and sets `tokens` to the number of sampled tokens."""

    most: int
    tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class EpisodeRequests:
    """Samples completions for one episode and records their times."""

    policy: Policy
    pace: Pace
    limit_s: float  # `Limits.wall_s`
    timeout_s: float  # seconds for one request
    spent_s: Callable[[], float]  # returns the seconds that the episode has taken so far
    sampling: SamplingTime
    stalls: StallCount = field(default_factory=StallCount)  # stalls of the driver's event loop since the episode started
    _cut: bool = False
    _version: int | None = None  # weight version that sampled last; the server's cache belongs to it

    @property
    def left_s(self) -> float:
        """The seconds for which the episode may still sample. The remaining time is reserved for fetching the tokens of a cut-off
        request."""
        return self.limit_s - fetch_reserve_s(self.limit_s) - self.spent_s()

    @property
    def out_of_time(self) -> bool:
        """Whether the episode may send no more requests."""
        return self._cut or self.left_s <= 0

    async def sample(
        self, token_ids: Sequence[int], params: Callable[[int], SamplingParams], max_tokens: int, name: str, *, reads: int
    ) -> Completion:
        """Returns a completion of at most `max_tokens` tokens. The completion has the finish reason `CUT` if it stopped because the
        episode's time ran out.

        Args:
            params: returns the sampling parameters for a maximum number of tokens.
            name: id of the first request; continuations append a number.
            reads: number of tokens in `token_ids` that the server has not computed for this episode yet.

        Raises:
            OutOfTime: the episode's time ran out before a token was sampled.
            SlowServer: the turn lost at least `timeout_s` because of a slow server.
            ServingError: the server failed.
        """
        completion: Completion | None = None
        lost_before_s = self.sampling.lost_s
        for number in count():  # terminates because each request takes time
            ids = [] if completion is None else list(completion.token_ids)
            request = params(max_tokens - len(ids)), f"{name}.{number}" if number else name
            part = await self._part([*token_ids, *ids], *request, first=not number, reads=0 if ids else reads, lost_before_s=lost_before_s)
            completion = part if completion is None else join_completions(completion, part)
            if not completion.token_ids and (newest := self.sampling.newest) is not None and newest.usual_s is not None:
                reads = int(reads * max(0.0, 1.0 - newest.seconds / newest.usual_s))  # the server already computed the rest
            if completion.finish_reason != CUT or len(completion.token_ids) >= max_tokens or self.out_of_time:
                break
        assert completion is not None, "max_tokens is positive"
        if len(completion.token_ids) >= max_tokens and completion.finish_reason == CUT:
            return replace(completion, finish_reason="length")
        if completion.token_ids or completion.finish_reason != CUT:
            return completion
        raise OutOfTime("the episode's time ended before the policy sampled a token")

    async def _part(
        self, token_ids: Sequence[int], params: SamplingParams, name: str, *, first: bool, reads: int, lost_before_s: float
    ) -> Completion:
        left_s = self.left_s
        if left_s <= 0:
            return EMPTY_COMPLETION
        whole = bool(params.constraint)  # a continuation does not have the grammar state of the request that was cut off
        timeout_s = left_s if whole else min(left_s, self.timeout_s, self.limit_s / REQUESTS_PER_EPISODE)
        if first and not whole and not self.pace.known:
            timeout_s = min(timeout_s / 2, FIRST_S)
        request, tokens, cut = self.pace.begin(loop_time(), reads=reads), None, False
        self.sampling.begin(loop_time())
        try:
            completion = await self.policy.generate(token_ids, params, request_id=name, timeout_s=timeout_s)
            tokens, cut = len(completion.token_ids), completion.finish_reason == CUT
            if completion.versions:
                if self._version not in (None, completion.versions[0].version):  # another version's cache cannot be used
                    reads = len(token_ids)
                self._version = completion.versions[-1].version
        finally:
            reading = self.pace.end(request, loop_time(), tokens=tokens, at_most=params.max_tokens, cut=cut, reads=reads)
            self.sampling.end(loop_time(), reading)
        if cut and timeout_s >= left_s:
            self._cut = True
        elif cut and self.sampling.lost_s - lost_before_s >= self.timeout_s:
            raise SlowServer(f"request {name}: the server was slow for {self.timeout_s:g} s; {self._figures(reading)}\n  fix: {ADVICE}")
        return completion

    @contextmanager
    def external_request(self, at_most: int, *, within_s: float) -> Iterator[TimedExternalRequest]:
        """See `LiveEpisode.external_request`."""
        request, most, left_s = self.pace.begin(loop_time()), at_most, min(within_s, max(0.0, self.left_s))
        usual_s = self.pace.usual_s(at_most, self.pace.in_flight, cut=True)
        if usual_s is not None:
            most = max(1, min(at_most, int(at_most * left_s / (SLOW_FACTOR * usual_s))))
        request_limits = TimedExternalRequest(most)
        self.sampling.begin(loop_time())
        try:
            yield request_limits
        finally:
            reading = self.pace.end(request, loop_time(), tokens=request_limits.tokens, at_most=most)
            self.sampling.end(loop_time(), reading)

    def timeout_failure(self, *, program_s: float, sandbox_s: float, turn: int) -> Failure | None:
        """Returns the failure of an episode that used up its time; None if the policy is to blame and its programs took more time than
        sampling."""
        sampled_s, lost_s, stalled_s = self.sampling.sampled_s, self.sampling.lost_s, self.stalls.seconds
        blame = blame_for_timeout(self.limit_s, program_s=program_s, sampled_s=sampled_s, lost_s=lost_s, stalled_s=stalled_s)
        spent = f"{self.limit_s:g} s: programs took {program_s:.1f} s, sampling {sampled_s + lost_s:.1f} s"
        figures = "" if self.sampling.newest is None else f"; {self._figures(self.sampling.newest)}"
        if blame is Blame.POLICY:
            if sampled_s < program_s:
                return None
            message = f"the policy used up its {spent}{figures}\n  fix: if it needs more time, {ADVICE}"
            return Failure(stage="generate", blame=blame, kind=WALL_LIMIT, message=message, turn=turn)
        if stalled_s > LOST_SHARE * self.limit_s:
            return infrastructure_fault(
                "episode", DRIVER_STALLED, f"the episode used up its {spent}: {self.stalls.text}{figures}", turn=turn
            )
        if lost_s > LOST_SHARE * self.limit_s:
            kind, slow = WALL_LIMIT, f"the server was silent for {lost_s:.1f} s, and the run has no usual pace yet"
            if self.pace.known:
                kind, slow = (
                    SLOW_SERVER,
                    f"the server was slow: requests that took over {SLOW_FACTOR:g} times as long as usual cost {lost_s:.1f} s",
                )
            return infrastructure_fault("generate", kind, f"{slow}; the episode had {spent}{figures}\n  fix: {ADVICE}", turn=turn)
        other_s = self.limit_s - program_s - sampled_s - lost_s
        message = f"the episode used up its {spent}, everything else {other_s:.1f} s (sandboxes {sandbox_s:.1f} s, including programs)"
        return infrastructure_fault("episode", WALL_LIMIT, f"{message}\n  fix: {ADVICE}", turn=turn)

    def _figures(self, reading: Reading) -> str:
        """Returns the pace of the newest request and the usual pace."""
        now_ = "unknown" if reading.tokens is None else f"{reading.tokens / max(reading.seconds, 1e-9):.3g} tokens/s"
        usual = "no history"
        if reading.usual_s is not None and reading.tokens:
            usual = f"usually {reading.tokens / max(reading.usual_s, 1e-9):.3g}"
        elif reading.usual_s is not None:
            usual = f"usually done in {reading.usual_s:.3g} s"
        waiting = "" if self.pace.slots is None else f", {self.pace.waiting} of them waiting"
        return f"the newest request had {now_} ({usual}) with {reading.in_flight:.3g} requests in flight{waiting}"


EMPTY_COMPLETION = Completion(token_ids=(), logprobs=(), versions=(), finish_reason=CUT)


def thinking_bound(task: Task, thinking: Thinking | None) -> tuple[int, Thinking] | None:
    """Returns the task's bound on thinking, in tokens, and how to end thinking; None if there is no bound.

    Raises `TaskError` if the bound cannot be enforced.
    """
    most = task.limits.thinking_tokens
    if most is None:
        return None
    if thinking is None:
        raise TaskError(
            f"task {task.id!r}: limits.thinking_tokens={most} requires a chat template with <think> and </think>, and an agent that ends"
            " thinking, as the built-in agents do",
            fix="remove the limit, or use a different model or agent",
        )
    return most, thinking


class SampleTokens(Protocol):
    """Samples at most `max_tokens` tokens after `token_ids`."""

    async def __call__(self, token_ids: Sequence[int], max_tokens: int, part: str = "") -> Completion: ...


async def sample_turn(context: Sequence[int], budget: int, ask: SampleTokens, thought: tuple[int, Thinking] | None) -> Completion:
    """Returns a completion of at most `budget` tokens, including forced tokens.

    Args:
        thought: the bound on thinking and how to end thinking; None means no bound. A bound has no effect if it and the end mark
            leave no tokens of the budget.
    """
    if thought is None or thought[0] + len(thought[1].end) >= budget:
        return await ask(context, budget)
    most, thinking = thought
    first = await ask(context, most)
    if first.finish_reason != "length" or len(first.token_ids) != most:
        return first
    forced = thinking.end if thinking.unfinished(first.token_ids) else ()
    try:
        rest = await ask([*context, *first.token_ids, *forced], budget - most - len(forced), ANSWER)
    except OutOfTime:
        return replace(first, finish_reason=CUT)
    return join_completions(first, rest, forced)


def join_completions(first: Completion, rest: Completion, forced: tuple[int, ...] = ()) -> Completion:
    """Joins two parts of a turn, with the forced tokens between them.

    The forced tokens belong to the preceding version span and have a logprob of 0.
    """
    start = len(first.token_ids)
    end = start + len(forced)
    spans = list(first.versions)
    if forced:
        spans[-1] = VersionSpan(version=spans[-1].version, start=spans[-1].start, end=end)
    spans += [VersionSpan(version=version.version, start=end + version.start, end=end + version.end) for version in rest.versions]
    supports = (part.supports or len(part.token_ids) for part in (first, rest))
    return Completion(
        token_ids=(*first.token_ids, *forced, *rest.token_ids),
        logprobs=(*first.logprobs, *(0.0,) * len(forced), *rest.logprobs),
        versions=tuple(spans),
        finish_reason=rest.finish_reason,
        supports=Supports.join((next(supports), len(forced), next(supports))),
        forced=tuple(range(start, end)),
    )

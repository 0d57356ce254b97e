"""Decides which attempts of a group start, which the group waits for, and which it cancels. Also limits how many episodes run at once.

`agentrl.rollout.group` runs the attempts. Concurrent episodes are limited by number and by the use of the servers' KV caches.

A server with a full cache evicts running requests and later recomputes their contexts, so too many concurrent episodes slow down all of
them. The cache use of a new episode is unknown; it is estimated by the average of the episodes in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from agentrl.base.numbers import all_equal
from agentrl.protocols import CacheUse
from agentrl.protocols.reward import AWAITING_GROUP_JUDGE
from agentrl.records import Cancelled, ScoredEpisode
from agentrl.rollout.active import ActiveEpisode

SPARE, EQUAL = "spare", "equal"
"""`Cancelled.reason`: enough attempts had ended (spare), or the first attempts had equal scores (equal)."""


@dataclass(slots=True, eq=False)
class GroupAttempt:
    """An attempt in a group: waiting, running, ended or abandoned."""

    race: AttemptScheduler
    number: int
    name: str
    group: int
    job: asyncio.Task[None] | None = None  # None before it starts
    episode: ActiveEpisode | None = None  # the attempt's newest episode
    scored: ScoredEpisode | None = None  # None until it ends
    abandoned: bool = False
    suspect: bool = False  # the attempt repeats its actions after a fault, so the group must not cancel it as unneeded

    def abandon(self) -> bool:
        """Abandons this attempt after a fault if the group has enough other attempts. Returns whether the attempt was abandoned."""
        return self.race.abandon(self)


class AttemptScheduler:
    """Schedules the attempts of one group. `size` attempts must count, and `size + spare` attempts may start.

    The number of attempts that run at once is the number still needed, plus `spare`. If an attempt is excluded or has no score, an
    additional attempt starts. When `size` attempts count, the others are cancelled, except those that repeat their actions after a fault.
    If `first` is set, only `first` attempts start. When these attempts count, the other attempts start if the scores differ. If the scores
    are equal, the group ends.

    Args:
        names: names of the attempts, in the order in which they start.
        begin: starts an attempt, and returns its asyncio task; None if the group is shutting down.
        first: number of attempts that start first; 0 starts all at once.
    """

    def __init__(
        self, names: Sequence[str], *, group: int, size: int, begin: Callable[[GroupAttempt], asyncio.Task[None] | None], first: int = 0
    ) -> None:
        self.attempts = tuple(GroupAttempt(self, number, name, group) for number, name in enumerate(names))
        self.counted: list[GroupAttempt] = []  # in the order in which they ended
        self._size, self._spare, self._first = size, len(names) - size, first or size
        self._begin = begin
        self._waiting = list(self.attempts)
        self._before: list[GroupAttempt] = []  # finished by an earlier process; no other attempt starts before they are recorded
        self._may_count = len(names)
        self._over, self._reason = False, SPARE

    def start(self, ended: Sequence[int] = ()) -> None:
        """Starts the schedule. `ended`: numbers of attempts that an earlier process finished, recorded before others start."""
        self._before = [attempt for attempt in self.attempts if attempt.number in ended]
        for attempt in self._before:
            self._start(attempt)
        self._advance()

    def record_end(self, attempt: GroupAttempt, scored: ScoredEpisode) -> None:
        """Records an attempt that ended."""
        attempt.scored = scored
        if counts_for_group(scored):
            if not self._over or attempt.suspect:
                self.counted.append(attempt)
        elif not attempt.abandoned:
            self._may_count -= 1
        self._advance()

    def abandon(self, attempt: GroupAttempt) -> bool:
        """Abandons an attempt if the group has enough other attempts. Returns whether the attempt was abandoned."""
        if self._may_count - 1 >= self._size:
            self._may_count -= 1
            attempt.abandoned = True
        return attempt.abandoned

    def stop(self) -> None:
        """Prevents the start of more attempts, because the group failed."""
        self._over = True

    @property
    def episodes(self) -> tuple[ScoredEpisode, ...]:
        """The group's attempts in order: those that count, and those that were excluded or have no score."""
        counted = {attempt.number for attempt in self.counted}
        return tuple(
            attempt.scored
            for attempt in self.attempts
            if attempt.scored and (attempt.number in counted or not counts_for_group(attempt.scored))
        )

    @property
    def cancelled(self) -> tuple[Cancelled, ...]:
        """The records of the cancelled attempts, in order."""
        counted = {attempt.number for attempt in self.counted}
        return tuple(
            _cancelled(attempt, self._reason)
            for attempt in self.attempts
            if attempt.number not in counted and (attempt.scored is None or counts_for_group(attempt.scored))
        )

    def _advance(self) -> None:
        """Ends the schedule, or starts the attempts that it needs."""
        if self._over:
            return
        if len(self.counted) >= self._size:
            self._end(SPARE)
            return
        if any(attempt.scored is None for attempt in self._before):
            return
        if len(self.counted) >= self._first and self._equal():
            self._end(EQUAL)
            return
        wanted = self._size if len(self.counted) >= self._first else self._first
        playing = sum(attempt.job is not None and attempt.scored is None for attempt in self.attempts)
        while self._waiting and playing + len(self.counted) < wanted + self._spare:
            self._start(self._waiting[0])
            playing += 1

    def _equal(self) -> bool:
        scores = [attempt.scored.score for attempt in self.counted if attempt.scored is not None]
        if any(score.pending for score in scores):
            return False
        return all_equal(score.value for score in scores if score.value is not None)

    def _end(self, reason: str) -> None:
        self._over, self._reason = True, reason
        for attempt in self.attempts:
            if attempt.scored is None and attempt.job is not None and not attempt.suspect:
                attempt.job.cancel()

    def _start(self, attempt: GroupAttempt) -> None:
        self._waiting.remove(attempt)
        attempt.job = self._begin(attempt)


def counts_for_group(scored: ScoredEpisode) -> bool:
    """Whether an attempt counts towards its group: it has a score, or its score is still pending."""
    return not scored.episode.left_out and (not scored.score.is_absent or scored.score.reason == AWAITING_GROUP_JUDGE)


def _cancelled(attempt: GroupAttempt, reason: str) -> Cancelled:
    if attempt.scored is not None:  # the attempt ended when it was no longer needed
        episode = attempt.scored.episode
        turns = sum(len(trajectory.own_turns) for trajectory in episode.trajectories)
        return Cancelled(episode_id=episode.id, reason=reason, turns=turns, tokens=episode.completion_tokens, wall_s=episode.wall_s)
    if attempt.episode is None:
        return Cancelled(episode_id=f"{attempt.name}-a0", reason=reason, begun=False)
    return attempt.episode.cancellation_record(reason)


log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between checks of the cache use."""


class Admission:
    """An asynchronous context manager around each episode. Entering waits until the episode may start.

    Between two readings of the cache use u, with n episodes in flight, at most n (full - u) / u more may start: the number that would fill
    the cache up to `full` at the average use. With several caches, both the use and the free shares are summed. A cache beyond `full` has
    no free share. One episode may always run. Without readings, only `most` limits the number of episodes. Episodes start in the order in
    which they arrive.

    Args:
        most: maximum number of episodes in flight.
        use: returns the newest reading, or None before the first reading.
        full: share of each cache that may be in use; 1 disables this limit.
    """

    def __init__(self, most: int, *, use: Callable[[], CacheUse | None] = lambda: None, full: float = 1.0) -> None:
        self.in_flight = 0
        self.held = 0  # number of episodes that had to wait for the cache
        self._most = most
        self._slots = asyncio.Semaphore(most)
        self._next = asyncio.Lock()
        self._use, self._full = use, full
        self._reading, self._room = -1, 0

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        try:
            if self._full < 1:
                async with self._next:
                    await self._wait()
        except BaseException:
            self._slots.release()
            raise
        self.in_flight += 1

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.in_flight -= 1
        self._slots.release()

    async def _wait(self) -> None:
        if self._fits():
            return
        self.held += 1
        if self.held == 1:
            log.info("the server's KV cache is %.0f%% full: new episodes wait until other episodes end", 100 * self._full)
        while not self._fits():
            await asyncio.sleep(POLL_S)

    def _fits(self) -> bool:
        """Returns whether one more episode may start now. If so, counts the episode as running."""
        use = self._use()
        taken = 0.0 if use is None else sum(use.shares)
        if use is None or taken <= 0 or self.in_flight == 0:
            return True
        if use.reading != self._reading:
            room = self.in_flight * sum(max(0.0, self._full - share) for share in use.shares) / taken
            self._reading, self._room = use.reading, int(min(room, self._most))  # `room` is huge if hardly anything is in use
        self._room -= 1
        return self._room >= 0

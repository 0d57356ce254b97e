"""Which attempts of a group begin, which are waited for, and which their group goes on without.

Only decisions are made here, each at the moment that an attempt ends; what an attempt is, `agentrl.rollout.group` knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.base.scores import all_equal
from agentrl.protocols.group_judge import AWAITING_GROUP_JUDGE
from agentrl.records import Cancelled, ScoredEpisode
from agentrl.rollout.active import ActiveEpisode

SPARE, EQUAL = "spare", "equal"
"""`Cancelled.reason`: as many attempts as the group needs had ended; the first ones had all scored the same."""


@dataclass(slots=True, eq=False)
class GroupAttempt:
    """One attempt of a group: waiting, playing, ended, or done without."""

    race: AttemptScheduler
    number: int
    name: str
    group: int
    job: asyncio.Task[None] | None = None  # None: it has not begun
    life: ActiveEpisode | None = None  # the newest that it played
    scored: ScoredEpisode | None = None  # None: it has not ended
    abandoned: bool = False

    def abandon(self) -> bool:
        """Whether another attempt takes this place after a fault, so that nothing has to be tried again; from then on it does."""
        return self.race.abandon(self)


class AttemptScheduler:
    """The attempts of one group: `size` of them are to count, and `size + spare` may begin.

    As many are in play as can still be needed, and `spare` more: one that ends without a score, or is left out, makes room for another.
    When `size` count, those that are left are cancelled. Where only `first` begin at first, the others do when so many count and have not
    all the same score; if they have, the race is over.

    Args:
        names: of the attempts, in the order in which they begin.
        first: see above; 0: all begin at once.
        begin: starts one; None where the group is being ended.
    """

    def __init__(
        self, names: Sequence[str], *, group: int, size: int, begin: Callable[[GroupAttempt], asyncio.Task[None] | None], first: int = 0
    ) -> None:
        self.attempts = tuple(GroupAttempt(self, number, name, group) for number, name in enumerate(names))
        self.counted: list[GroupAttempt] = []  # in the order in which they ended
        self._size, self._spare, self._first = size, len(names) - size, first or size
        self._begin = begin
        self._waiting = list(self.attempts)
        self._before: list[GroupAttempt] = []  # that had ended before; no other begins until they are in
        self._may_count = len(names)
        self._over, self._reason = False, SPARE

    def start(self, ended: Sequence[int] = ()) -> None:
        """Begins. `ended`: numbers of attempts that a process that died had finished: they come before any other is thought of."""
        self._before = [place for place in self.attempts if place.number in ended]
        for place in self._before:
            self._play(place)
        self._go_on()

    def record_end(self, place: GroupAttempt, scored: ScoredEpisode) -> None:
        """Told of every attempt that has ended, when it has."""
        place.scored = scored
        if counts_for_group(scored):
            if not self._over:
                self.counted.append(place)
        elif not place.abandoned:
            self._may_count -= 1
        self._go_on()

    def abandon(self, place: GroupAttempt) -> bool:
        """Whether the group has enough attempts without this one."""
        if self._may_count - 1 >= self._size:
            self._may_count -= 1
            place.abandoned = True
        return place.abandoned

    def stop(self) -> None:
        """No further attempt begins: the group comes to nothing."""
        self._over = True

    @property
    def episodes(self) -> tuple[ScoredEpisode, ...]:
        """The attempts that the group has, in order: those that count, and those that were left out or have no score."""
        kept = {place.number for place in self.counted}
        return tuple(one.scored for one in self.attempts if one.scored and (one.number in kept or not counts_for_group(one.scored)))

    @property
    def cancelled(self) -> tuple[Cancelled, ...]:
        """The attempts that it went on without, in order."""
        kept = {place.number for place in self.counted}
        return tuple(
            _cancelled(one, self._reason)
            for one in self.attempts
            if one.number not in kept and (one.scored is None or counts_for_group(one.scored))
        )

    def _go_on(self) -> None:
        """Ends the race, or begins what it needs."""
        if self._over:
            return
        if len(self.counted) >= self._size:
            self._end(SPARE)
            return
        if any(place.scored is None for place in self._before):
            return
        if len(self.counted) >= self._first and self._equal():
            self._end(EQUAL)
            return
        wanted = self._size if len(self.counted) >= self._first else self._first
        playing = sum(place.job is not None and place.scored is None for place in self.attempts)
        while self._waiting and playing + len(self.counted) < wanted + self._spare:
            self._play(self._waiting[0])
            playing += 1

    def _equal(self) -> bool:
        scores = [place.scored.score.value for place in self.counted if place.scored is not None]
        return all_equal(score for score in scores if score is not None)

    def _end(self, reason: str) -> None:
        self._over, self._reason = True, reason
        for place in self.attempts:
            if place.scored is None and place.job is not None:
                place.job.cancel()

    def _play(self, place: GroupAttempt) -> None:
        self._waiting.remove(place)
        place.job = self._begin(place)


def counts_for_group(scored: ScoredEpisode) -> bool:
    """Whether an attempt is one of those that its group needs: it has a score, or the judge of its group will give it one."""
    return not scored.episode.left_out and (scored.score.value is not None or scored.score.reason == AWAITING_GROUP_JUDGE)


def _cancelled(place: GroupAttempt, reason: str) -> Cancelled:
    if place.scored is not None:  # it ended in the very moment in which it was no longer needed
        episode = place.scored.episode
        turns = sum(len(line.own_turns) for line in episode.trajectories)
        return Cancelled(episode_id=episode.id, reason=reason, turns=turns, tokens=episode.completion_tokens, wall_s=episode.wall_s)
    if place.life is None:
        return Cancelled(episode_id=f"{place.name}-a0", reason=reason, begun=False)
    return place.life.cancellation_record(reason)

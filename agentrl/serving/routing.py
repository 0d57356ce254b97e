"""Chooses the server for an episode's requests: the one that has its context cached, unless it is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Placed:
    """A running episode."""

    task_key: str
    replica: int | None = None  # None before its first request
    tokens: int = 0  # of its longest context so far


class EpisodeRouter:
    """Tracks which episode is on which replica. It does no I/O, so a choice and its record are atomic.

    An episode stays on its replica while that is able. Otherwise it goes to a replica that has an episode of the same task, whose prompt is
    cached there, unless that one is ahead of the least loaded replica by more than `apart` contexts of this length. A replica's load is the
    tokens of the longest context of each of its episodes, including those that wait for tools.
    """

    def __init__(self, replicas: int, *, apart: int) -> None:
        self.moved = 0  # how often an episode had to leave a replica
        self.loads = [0] * replicas
        self._apart = apart
        self._episodes: dict[str, _Placed] = {}
        self._tasks: dict[str, Counter[int]] = {}  # task -> replica -> its episodes there

    def begin(self, episode_id: str, task_key: str) -> None:
        """Registers an episode, which its first request places. Replaces an earlier one with that id."""
        self.end(episode_id)
        self._episodes[episode_id] = _Placed(task_key)

    def end(self, episode_id: str) -> None:
        """Forgets an episode. Idempotent."""
        if (placed := self._episodes.pop(episode_id, None)) is not None:
            self._leave(placed)

    def replica_of(self, episode_id: str) -> int | None:
        """Returns the episode's replica, if it has one."""
        placed = self._episodes.get(episode_id)
        return None if placed is None else placed.replica

    def choose(self, episode_id: str, tokens: int, *, able: Sequence[int], full: Collection[int] = ()) -> int:
        """Returns the replica for a request of `tokens` tokens; the least loaded one if the episode is unknown.

        `able`: replicas that may get it, at least one. `full`: replicas without room for another episode; ignored if all are full.
        """
        placed = self._episodes.get(episode_id)
        if placed is None:
            return self._least(able)
        if placed.replica not in able:
            chosen = self._place(placed.task_key, tokens, [number for number in able if number not in full] or able)
            if placed.replica is not None:
                self.moved += 1
                self._leave(placed)
            placed.replica = chosen
            self.loads[chosen] += placed.tokens
            self._tasks.setdefault(placed.task_key, Counter())[chosen] += 1
        self.record_context(episode_id, tokens)
        assert placed.replica is not None, "it was placed"
        return placed.replica

    def record_context(self, episode_id: str, tokens: int) -> None:
        """Records the current length of an episode's context."""
        placed = self._episodes.get(episode_id)
        if placed is not None and placed.replica is not None and tokens > placed.tokens:
            self.loads[placed.replica] += tokens - placed.tokens
            placed.tokens = tokens

    def _place(self, task_key: str, tokens: int, able: Sequence[int]) -> int:
        least = self._least(able)
        there = self._tasks.get(task_key, Counter())
        alike = [number for number in able if there[number]]
        nearest = self._least(alike) if alike else least
        return nearest if self.loads[nearest] - self.loads[least] <= self._apart * tokens else least

    def _least(self, able: Sequence[int]) -> int:
        return min(able, key=lambda number: (self.loads[number], number))

    def _leave(self, placed: _Placed) -> None:
        if placed.replica is None:
            return
        self.loads[placed.replica] -= placed.tokens
        there = self._tasks[placed.task_key]
        there[placed.replica] -= 1
        if not there.total():
            del self._tasks[placed.task_key]

"""Which attempts of a group start and count, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from agentrl.records import Episode, PendingPart, Score, ScoredEpisode, Trajectory
from agentrl.rollout.scheduling import EQUAL, SPARE, AttemptScheduler, GroupAttempt

LATE = -1.0
"""Stands for a score that arrives later."""


class Job:
    """Stands for the asyncio task of an attempt."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def scored(number: int, value: float | None) -> ScoredEpisode:
    episode = Episode(id=f"{number}", task_id="t", task_key="k", trajectories=(Trajectory(agent="main", turns=()),))
    if value == LATE:
        return ScoredEpisode(episode=episode, score=Score(value=None, pending=(PendingPart(name="human"),)))
    return ScoredEpisode(episode=episode, score=Score(value=value, reason="" if value is not None else "none"))


def raced(values: Sequence[float | None], *, size: int, first: int = 0, ended: Sequence[int] = ()) -> tuple[AttemptScheduler, list[int]]:
    """Returns a schedule whose attempts end with these scores in the order in which they start, and the numbers of those that started."""
    started: list[GroupAttempt] = []

    def begin(attempt: GroupAttempt) -> Any:
        started.append(attempt)
        return Job()

    race = AttemptScheduler([str(number) for number in range(len(values))], group=0, size=size, begin=begin, first=first)
    race.start(ended)
    for attempt in started:  # `began` grows in the loop
        if not attempt.job.cancelled:  # type: ignore[union-attr]
            race.record_end(attempt, scored(attempt.number, values[attempt.number]))
    return race, [attempt.number for attempt in started]


@pytest.mark.parametrize(
    ("values", "first", "started", "count", "reason"),
    [
        ((0, 0, 1, 1, 1), 2, 2, 2, EQUAL),
        ((0, 1, 1, 1, 1), 2, 5, 5, ""),
        ((None, 0, 0, 1, 1), 2, 3, 2, EQUAL),  # unscored attempts decide nothing
        ((None, 0, 1, None, 1), 2, 5, 3, ""),
        ((0, 0, 0, 0, 1), 4, 4, 4, EQUAL),
        ((LATE, LATE, 0, 0, 0), 2, 5, 5, ""),  # late scores may differ
        ((0, LATE, None, 0, 0), 2, 5, 4, ""),
        ((0, 0, 0, 0, 0), 0, 5, 5, ""),
    ],
)
def test_further_attempts_start_only_if_the_first_scores_differ(
    values: tuple[float | None, ...], first: int, started: int, count: int, reason: str
) -> None:
    race, numbers = raced(values, size=5, first=first)
    assert numbers == list(range(started)) and len(race.counted) == count
    assert {attempt.reason for attempt in race.cancelled} == ({reason} if reason else set())
    assert not any(attempt.begun for attempt in race.cancelled) and len(race.episodes) + len(race.cancelled) == 5


def test_spare_attempts_start_at_once_and_the_slowest_are_cancelled() -> None:
    race, numbers = raced((1, 1, 0, 0, 0, 0), size=4, first=2)
    assert numbers == [0, 1, 2, 3] and [attempt.score.value for attempt in race.episodes] == [1, 1]
    assert [(attempt.reason, attempt.begun) for attempt in race.cancelled] == [(EQUAL, False)] * 4, "the test sets no running episode"
    race, numbers = raced((1, 0, 0, 0, 0, 0), size=4, first=2)
    assert numbers == [0, 1, 2, 3, 4, 5] and len(race.episodes) == 4 and {attempt.reason for attempt in race.cancelled} == {SPARE}


def test_attempts_finished_before_a_kill_are_recorded_first() -> None:
    """The first two differed, so others started. Equal scores of the first to end after the restart do not matter."""
    race, numbers = raced((0, 0, 0, 1, 1), size=5, first=2, ended=(0, 1, 3))
    assert numbers[:3] == [0, 1, 3] and sorted(numbers) == [0, 1, 2, 3, 4] and len(race.episodes) == 5
    race, numbers = raced((0, 0, 1, 1, 1), size=5, first=2, ended=(0, 1))
    assert numbers == [0, 1] and len(race.cancelled) == 3


@pytest.mark.parametrize(("size", "first"), [(4, 2), (5, 3), (6, 2)])
@pytest.mark.parametrize("p", [Fraction(1, 2), Fraction(1, 50), Fraction(4, 5)])
def test_stopping_weights_a_task_as_documented(size: int, first: int, p: Fraction) -> None:
    """Compares the expected sum of advantages times score functions over all score vectors, in units of grad p, with full groups."""
    stopped = full = attempts = Fraction(0)
    for values in product((0, 1), repeat=size):
        weight = p ** sum(values) * (1 - p) ** (size - sum(values))
        race, _ = raced(values, size=size, first=first)
        counted = [Fraction(attempt.score.value or 0) for attempt in race.episodes]
        stopped, full = stopped + weight * signal(counted, p), full + weight * signal([Fraction(value) for value in values], p)
        attempts += weight * len(counted)
    remaining = size - first
    ends = (1 - p) ** (first - 1) * (size - 1 - (remaining - 1) * p) + p ** (first - 1) * (size - 1 - (remaining - 1) * (1 - p))
    assert full == size - 1 and stopped / full == 1 - Fraction(remaining, size * (size - 1)) * ends
    assert attempts == size - remaining * (p**first + (1 - p) ** first)
    assert stopped / full <= attempts / size, "for a single p there is no gain"


def signal(values: Sequence[Fraction], p: Fraction) -> Fraction:
    mean = sum(values) / len(values)
    return sum((value - mean) * (1 / p if value else -1 / (1 - p)) for value in values) + Fraction(0)

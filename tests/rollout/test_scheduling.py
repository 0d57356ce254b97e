"""Which attempts of a group start and count, without running any."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from agentrl.records import Episode, PendingPart, Score, ScoredEpisode, Trajectory
from agentrl.rollout.scheduling import EQUAL, SPARE, AttemptScheduler, GroupAttempt

LATE = -1.0
"""The score of an attempt is still to come."""


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
    """A schedule whose attempts end in the order in which they start, with these scores; and the numbers of those that started."""
    began: list[GroupAttempt] = []

    def begin(place: GroupAttempt) -> Any:
        began.append(place)
        return Job()

    race = AttemptScheduler([str(number) for number in range(len(values))], group=0, size=size, begin=begin, first=first)
    race.start(ended)
    for place in began:  # which grows
        if not place.job.cancelled:  # type: ignore[union-attr]
            race.record_end(place, scored(place.number, values[place.number]))
    return race, [place.number for place in began]


@pytest.mark.parametrize(
    ("values", "first", "began", "count", "reason"),
    [
        ((0, 0, 1, 1, 1), 2, 2, 2, EQUAL),
        ((0, 1, 1, 1, 1), 2, 5, 5, ""),
        ((None, 0, 0, 1, 1), 2, 3, 2, EQUAL),  # unscored attempts decide nothing
        ((None, 0, 1, None, 1), 2, 5, 3, ""),
        ((0, 0, 0, 0, 1), 4, 4, 4, EQUAL),
        ((LATE, LATE, 0, 0, 0), 2, 5, 5, ""),  # they may differ
        ((0, LATE, None, 0, 0), 2, 5, 4, ""),
        ((0, 0, 0, 0, 0), 0, 5, 5, ""),
    ],
)
def test_further_attempts_start_only_if_the_first_scores_differ(
    values: tuple[float | None, ...], first: int, began: int, count: int, reason: str
) -> None:
    race, numbers = raced(values, size=5, first=first)
    assert numbers == list(range(began)) and len(race.counted) == count
    assert {one.reason for one in race.cancelled} == ({reason} if reason else set())
    assert not any(one.begun for one in race.cancelled) and len(race.episodes) + len(race.cancelled) == 5


def test_spare_attempts_start_at_once_and_the_slowest_are_cancelled() -> None:
    race, numbers = raced((1, 1, 0, 0, 0, 0), size=4, first=2)
    assert numbers == [0, 1, 2, 3] and [one.score.value for one in race.episodes] == [1, 1]
    assert [(one.reason, one.begun) for one in race.cancelled] == [(EQUAL, False)] * 4, "no running episode was set here"
    race, numbers = raced((1, 0, 0, 0, 0, 0), size=4, first=2)
    assert numbers == [0, 1, 2, 3, 4, 5] and len(race.episodes) == 4 and {one.reason for one in race.cancelled} == {SPARE}


def test_attempts_finished_before_a_kill_are_recorded_first() -> None:
    """The first two differed, so others started; equal scores of the first to end now do not matter."""
    race, numbers = raced((0, 0, 0, 1, 1), size=5, first=2, ended=(0, 1, 3))
    assert numbers[:3] == [0, 1, 3] and sorted(numbers) == [0, 1, 2, 3, 4] and len(race.episodes) == 5
    race, numbers = raced((0, 0, 1, 1, 1), size=5, first=2, ended=(0, 1))
    assert numbers == [0, 1] and len(race.cancelled) == 3


@pytest.mark.parametrize(("size", "first"), [(4, 2), (5, 3), (6, 2)])
@pytest.mark.parametrize("p", [Fraction(1, 2), Fraction(1, 50), Fraction(4, 5)])
def test_stopping_weights_a_task_as_documented(size: int, first: int, p: Fraction) -> None:
    """Over all score vectors: the expected sum of advantages times score functions, in units of grad p, compared with full groups."""
    stopped = whole = attempts = Fraction(0)
    for values in product((0, 1), repeat=size):
        weight = p ** sum(values) * (1 - p) ** (size - sum(values))
        race, _ = raced(values, size=size, first=first)
        kept = [Fraction(one.score.value or 0) for one in race.episodes]
        stopped, whole = stopped + weight * signal(kept, p), whole + weight * signal([Fraction(one) for one in values], p)
        attempts += weight * len(kept)
    left = size - first
    ends = (1 - p) ** (first - 1) * (size - 1 - (left - 1) * p) + p ** (first - 1) * (size - 1 - (left - 1) * (1 - p))
    assert whole == size - 1 and stopped / whole == 1 - Fraction(left, size * (size - 1)) * ends
    assert attempts == size - left * (p**first + (1 - p) ** first)
    assert stopped / whole <= attempts / size, "for a single p there is no gain"


def signal(values: Sequence[Fraction], p: Fraction) -> Fraction:
    mean = sum(values) / len(values)
    return sum((value - mean) * (1 / p if value else -1 / (1 - p)) for value in values) + Fraction(0)

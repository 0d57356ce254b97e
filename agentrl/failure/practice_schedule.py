"""Which groups of a run practise, and on what: a pure function of the seed and the group's index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from random import Random
from types import MappingProxyType

from agentrl.config.tasks import PracticeConfig
from agentrl.failure.overlap import WithheldTasks
from agentrl.failure.practice import load_practice
from agentrl.records import Task


@dataclass(frozen=True, slots=True)
class PracticeSchedule:
    """The practice of some suites, each with its weight, that a share of all groups gets.

    Of the first `n` groups `floor(n * share)` practise, spread evenly. The suites take turns by weight; a suite's tasks come in a
    seeded order, a new one whenever all have had their turn.
    """

    tasks: Sequence[Sequence[Task]]  # [suite][task]
    weights: Sequence[int]  # [suite]
    share: Fraction
    seed: int
    _round: list[tuple[int, int]] = field(default_factory=list, repr=False)  # (suite, how many of it came before) in a round

    def __post_init__(self) -> None:
        turns = sorted(((turn + 0.5) / weight, suite) for suite, weight in enumerate(self.weights) for turn in range(weight))
        seen = [0] * len(self.weights)
        for _, suite in turns:
            self._round.append((suite, seen[suite]))
            seen[suite] += 1

    def practice_groups_before(self, group_index: int) -> int:
        """How many of the groups before this one practise."""
        return group_index * self.share.numerator // self.share.denominator

    def task_of_group(self, group_index: int) -> Task | None:
        """The group's task; None when it is a group of the family's own schedule."""
        number = self.practice_groups_before(group_index)
        return self._task(number) if self.practice_groups_before(group_index + 1) > number else None

    def _task(self, number: int) -> Task:
        rounds, place = divmod(number, len(self._round))
        suite, before = self._round[place]
        tasks = self.tasks[suite]
        epoch, position = divmod(rounds * self.weights[suite] + before, len(tasks))
        order = list(range(len(tasks)))
        Random(f"practice:{self.seed}:{suite}:{epoch}").shuffle(order)
        return tasks[order[position]]


def open_practice(
    config: PracticeConfig, *, seed: int, root: Path, withheld: WithheldTasks, files: Mapping[str, Path] = MappingProxyType({})
) -> PracticeSchedule:
    """The practice that a recipe asks for. Raises `UserError` where a suite has none, or one that must not be trained on.

    Args:
        files: suite -> the file to read in place of its own.
    """
    found = [[one.task for one in load_practice(root / suite, withheld=withheld, file=files.get(suite))] for suite in config.suites]
    return PracticeSchedule(found, tuple(config.suites.values()), Fraction(config.share).limit_denominator(1000), seed)

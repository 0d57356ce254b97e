"""`Doors`, the environment, and `DoorTasks`, its tasks: visits to houses."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

from agentrl.environment import NEWEST_NOTE, Environment, Observation, Step
from agentrl.environment.family import EnvironmentFamily
from agentrl.errors import UserError
from agentrl.records import Split, Task

DOORS = ("l", "n", "o", "d")  # one token each; the untrained policy often repeats the letter that it sees


class Doors(Environment):
    """Each day the agent opens a door. It sees where the gold is, and then writes a note: the letter of a door, any of the four.

    The reward is the share of the days on which the gold was behind the door that was opened. A morning shows only the newest note, so
    finding the gold takes a right note or luck.

    Args:
        gold: the door with the gold.
        days: days of an episode.
        visit: number of the visit, which notes contain so that later ones are newer.
    """

    rewards = (0.0, 1.0)
    actions = DOORS

    def __init__(self, gold: str, days: int = 1, visit: int = 1) -> None:
        self._gold, self._days, self._visit = gold, days, visit

    def reset(self, seed: int) -> str:
        """Starts the first day. The house does not depend on the seed."""
        self._turns = 0
        return NEWEST_NOTE

    def step(self, action: str) -> Step:
        """Opens a door, or writes a note and starts the next day."""
        self._turns += 1
        if self._turns % 2:
            return Step(observation=Observation(text=self._gold), reward=(action == self._gold) / self._days)
        ended = self._turns == 2 * self._days
        return Step(observation=Observation(text=NEWEST_NOTE), terminated=ended, note=f"{action}{self._visit}")

    @classmethod
    def expert(cls, observation: str) -> str:
        """Returns the door of the newest note, or the one with the gold."""
        return observation[0] if observation[0] in DOORS and observation != "no notes" else DOORS[0]


class DoorTasks:
    """Visits to houses. All visits to a house are one project, so with `memory.scope=project` they share notes.

    Task `index` visits house `index % houses`. After `visits` tasks for each house, different houses follow. A held-out episode has one
    day, so its own notes do not help it.

    Args:
        houses: houses that are visited in turn.
        visits: tasks for each house.
        days: days of a training episode, which reads its own notes on later days, so writing a right note pays.
        shuffled: whether visits share notes with visits of other houses, as a control.
        options: see `agentrl.environment.family.EnvironmentFamily`.

    Raises `UserError` for numbers below 1.
    """

    def __init__(self, seed: int = 0, *, houses: int = 16, visits: int = 6, days: int = 3, shuffled: bool = False, **options: Any) -> None:
        if min(houses, visits, days) < 1:
            raise UserError("doors needs at least 1 house, visit and day", fix="correct tasks.family.options")
        self._family = EnvironmentFamily("sandboxes.doors:Doors", seed=seed, **options)
        self.name = self._family.name
        self._seed, self._houses, self._visits, self._days, self._shuffled = seed, houses, visits, days, shuffled

    def size(self, split: Split) -> int | None:
        """Returns the number of tasks in the split; None if the split is endless."""
        return self._family.size(split)

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index of a split. Tasks with the same number of the visit have one kind."""
        task, house = self._family.task(split, index), index % self._houses
        street, visit = divmod(index // self._houses, self._visits)
        golds = list(DOORS) * math.ceil(self._houses / len(DOORS))  # every door equally often
        Random(f"doors:{self._seed}:{split}:{street}").shuffle(golds)
        owner = (house + visit) % self._houses if self._shuffled else house  # the house that the notes belong to
        data = {"kind": f"visit {visit + 1}", "project": f"{split} {street} {owner}"}
        assert task.environment is not None, "tasks of this family have an environment"
        options = {"gold": golds[house], "days": self._days if split is Split.TRAIN else 1, "visit": visit + 1}
        return replace(task, data=data, environment=replace(task.environment, options=options))

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

DOORS = ("l", "n", "o", "d")  # each is one token; the untrained policy often repeats the letter that it sees


class Doors(Environment):
    """Each day the agent opens a door, sees where the gold is, and then writes a note: the letter of any of the four doors.

    The reward is the share of days on which the gold was behind the opened door. In the morning, the agent sees only the newest note, so it
    needs a correct note or luck to find the gold.

    Args:
        gold: the door with the gold.
        days: number of days in an episode.
        visit: number of the visit. Notes contain this number, so that notes from later visits count as newer.
    """

    rewards = (0.0, 1.0)
    actions = DOORS

    def __init__(self, gold: str, days: int = 1, visit: int = 1) -> None:
        if gold not in DOORS or min(days, visit) < 1:
            raise UserError(
                f"Doors: gold={gold!r} must be one of {', '.join(DOORS)}, and days={days} and visit={visit} at least 1",
                fix="correct these options",
            )
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
        """Returns the door in the newest note or, if a note must be written, the door with the gold. Without a note, returns the first
        door."""
        return observation[0] if observation[0] in DOORS and observation != "no notes" else DOORS[0]


class DoorTasks:
    """Visits to houses. All visits to a house belong to one project, so they share notes if `memory.scope=project`.

    Task `index` visits house `index % houses`. After `visits` tasks per house, new houses follow. A held-out episode has one day, so its
    own notes do not help it.

    Args:
        houses: number of houses that are visited in turn.
        visits: number of tasks per house.
        days: number of days in a training episode. On later days, the episode reads its own notes, so a correct note pays off.
        shuffled: whether visits share notes with visits to other houses, as a control.
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
        """Returns the number of tasks in the split; None if the split is infinite."""
        return self._family.size(split)

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index in a split. Tasks with the same visit number have the same kind."""
        task, house = self._family.task(split, index), index % self._houses
        street, visit = divmod(index // self._houses, self._visits)
        golds = list(DOORS) * math.ceil(self._houses / len(DOORS))  # each door hides the gold equally often
        Random(f"doors:{self._seed}:{split}:{street}").shuffle(golds)
        owner = (house + visit) % self._houses if self._shuffled else house  # the house to which the notes belong
        data = {"kind": f"visit {visit + 1}", "project": f"{split} {street} {owner}"}
        assert task.environment is not None, "tasks of this family have an environment"
        options = {"gold": golds[house], "days": self._days if split is Split.TRAIN else 1, "visit": visit + 1}
        return replace(task, data=data, environment=replace(task.environment, options=options))

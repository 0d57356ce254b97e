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

DOORS = ("l", "n", "o", "d")  # letters to which the untrained policy gives similar probabilities


class Doors(Environment):
    """Each day the agent opens doors until it finds the gold, and then writes a note: the letter of a door, any of the four.

    A day's reward is its share of the episode's 1, halved by each empty door. A day ends without gold after four empty doors. A morning
    shows only the newest note, so gold on the first try takes a right note or luck.

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
        self._day, self._empty, self._found = 1, list[str](), False
        return NEWEST_NOTE

    def step(self, action: Any) -> Step | tuple[Any, ...]:
        """Opens a door; after the gold was found, writes the note."""
        if self._found:
            return self._next_day(note=f"{action}{self._visit}")
        if action == self._gold:
            self._found = True
            return action, 0.5 ** len(self._empty) / self._days, False
        self._empty.append(action)
        if len(self._empty) == len(DOORS):
            return self._next_day()
        return f"{NEWEST_NOTE}\nempty {' '.join(self._empty)}", 0.0, False

    def _next_day(self, note: str = "") -> Step:
        ended = self._day == self._days
        self._day, self._empty, self._found = self._day + 1, [], False
        return Step(observation=Observation(text=NEWEST_NOTE), terminated=ended, note=note)

    @classmethod
    def expert(cls, observation: str) -> str:
        """Returns the door of the newest note or of the gold, else the first that is not known to be empty."""
        shown, _, empty = observation.partition("\nempty ")
        newest = shown[0] if shown != "no notes" else ""
        return newest if newest in DOORS and not empty else next(door for door in DOORS if door not in empty)


class DoorTasks:
    """Visits to houses. All visits to a house are one project, so with `memory.scope=project` they share notes.

    Task `index` visits house `index % houses`; after `visits` tasks for each, other houses follow. A held-out episode has one day, so notes
    of its own do not help it.

    Args:
        houses: houses that are visited in turn.
        visits: tasks for each house.
        days: days of a training episode, which reads its own notes on later days, so writing a right note pays.
        shuffled: whether the notes that a visit shares are those of other houses, as a control.
        options: see `agentrl.environment.family.EnvironmentFamily`.

    Raises `UserError` for numbers below 1.
    """

    def __init__(self, seed: int = 0, *, houses: int = 16, visits: int = 6, days: int = 3, shuffled: bool = False, **options: Any) -> None:
        if min(houses, visits, days) < 1:
            raise UserError("houses, visits and days of the doors must be at least 1", fix="correct tasks.family.options")
        self._family = EnvironmentFamily("sandboxes.doors:Doors", seed=seed, **options)
        self.name = self._family.name
        self._seed, self._houses, self._visits, self._days, self._shuffled = seed, houses, visits, days, shuffled

    def size(self, split: Split) -> int | None:
        """Returns the number of tasks in the split; None if it is endless."""
        return self._family.size(split)

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index of a split. Tasks of the same visit are of one kind."""
        task, house = self._family.task(split, index), index % self._houses
        street, visit = divmod(index // self._houses, self._visits)
        golds = list(DOORS) * math.ceil(self._houses / len(DOORS))  # every door equally often
        Random(f"doors:{self._seed}:{split}:{street}").shuffle(golds)
        owner = (house + visit) % self._houses if self._shuffled else house  # of the notes
        data = {"kind": f"visit {visit + 1}", "project": f"{split} {street} {owner}"}
        assert task.environment is not None, "the family is of an environment"
        options = {"gold": golds[house], "days": self._days if split is Split.TRAIN else 1, "visit": visit + 1}
        return replace(task, data=data, environment=replace(task.environment, options=options))

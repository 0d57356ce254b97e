"""The doors: days, rewards and notes of the environment; houses, visits and owners of notes of its tasks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentrl.environment import NEWEST_NOTE
from agentrl.errors import UserError
from agentrl.memory import scope_of
from agentrl.records import Split, Task
from sandboxes.doors import Doors, DoorTasks
from sandboxes.doors.house import DOORS


def played(environment: Doors, *actions: str) -> list[tuple[str, float, bool, str]]:
    """Returns observation, reward, end and note of each step."""
    environment.reset(0)
    return [(step.observation.text, step.reward, step.terminated, step.note) for step in map(environment.step, actions)]


def test_a_day_is_a_door_and_a_note_of_any_door() -> None:
    assert played(Doors("o", days=2, visit=3), "l", "n", "o", "o") == [
        ("o", 0.0, False, ""),
        (NEWEST_NOTE, 0.0, False, "n3"),
        ("o", 0.5, False, ""),
        (NEWEST_NOTE, 0.0, True, "o3"),
    ]
    assert [step[1:3] for step in played(Doors("o"), "o", "o")] == [(1.0, False), (0.0, True)]


@pytest.mark.parametrize("options", [{"gold": "x"}, {"gold": "o", "days": 0}, {"gold": "o", "visit": 0}])
def test_invalid_options_are_user_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"gold='[xo]' must be one of l, n, o, d"):
        Doors(**options)


@pytest.mark.parametrize(("observation", "door"), [("no notes", "l"), ("d3", "d"), ("n", "n"), (NEWEST_NOTE, "l")])
def test_the_expert_trusts_the_newest_note(observation: str, door: str) -> None:
    assert Doors.expert(observation) == door


def gold_of(task: Task) -> str:
    assert task.environment is not None
    return str(task.environment.options["gold"])


@pytest.mark.parametrize("split", [Split.TRAIN, Split.HELDOUT])
def test_visits_to_a_house_share_gold_and_notes(split: Split) -> None:
    family = DoorTasks(houses=3, visits=2, limits={"turns": 5})
    tasks = [family.task(split, index) for index in range(12)]
    assert len({task.key for task in tasks}) == 12 and [task.kind for task in tasks] == [*["visit 1"] * 3, *["visit 2"] * 3] * 2
    for index in (0, 1, 2, 6, 7, 8):
        assert scope_of(tasks[index], "project") == scope_of(tasks[index + 3], "project") and gold_of(tasks[index]) == gold_of(
            tasks[index + 3]
        )
    assert len({scope_of(task, "project") for task in tasks}) == 6
    days = {task.environment.options["days"] for task in tasks if task.environment is not None}
    assert days == ({3} if split is Split.TRAIN else {1})
    assert Counter(gold_of(DoorTasks().task(split, index)) for index in range(16)) == dict.fromkeys(DOORS, 4)


def test_splits_and_seeds_have_other_houses() -> None:
    golds = {
        (seed, split): "".join(gold_of(DoorTasks(seed).task(split, index)) for index in range(16))
        for seed in (0, 1)
        for split in (Split.TRAIN, Split.HELDOUT)
    }
    assert len(set(golds.values())) == 4


def test_shuffled_notes_are_those_of_other_houses() -> None:
    family, houses, visits = DoorTasks(houses=5, visits=4, shuffled=True), 5, 4
    owners: dict[str, set[int]] = {}
    for index in range(houses * visits):
        owners.setdefault(scope_of(family.task(Split.HELDOUT, index), "project"), set()).add(index % houses)
    assert len(owners) == houses and all(len(visitors) == visits for visitors in owners.values()), "no house reads its own notes"


def test_numbers_below_one_are_an_error() -> None:
    for name in ("houses", "visits", "days"):
        with pytest.raises(UserError, match="at least 1"):
            DoorTasks(**{name: 0})

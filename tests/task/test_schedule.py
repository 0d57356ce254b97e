from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import Part, TasksConfig
from agentrl.environment import Environment
from agentrl.errors import PluginError, RecipeError, TaskError, UserError
from agentrl.records import Message, SandboxSpec, Split, Task
from agentrl.task import GroupSchedule, open_family, sandbox_specs


class Ten:
    """A family of ten tasks."""

    name = "ten"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def size(self, split: Split) -> int | None:
        return 10

    def task(self, split: Split, index: int) -> Task:
        message = Message(role="user", content=str(index))
        spec = SandboxSpec(image="none")
        return Task(id=f"{index}", family="ten", prompt=(message,), tools=(), sandbox=spec, verifiers=(), data={}, split=split)

    def gold(self, task: Task) -> str:
        return ""


def test_each_epoch_has_every_task_once_in_a_different_order() -> None:
    schedule = GroupSchedule(Ten(), seed=3)
    ids = [schedule.task(i).id for i in range(30)]
    assert Counter(ids) == {str(i): 3 for i in range(10)}
    assert ids[:10] != ids[10:20]


def test_task_depends_only_on_the_index() -> None:
    first, second = GroupSchedule(Ten(), seed=3), GroupSchedule(Ten(), seed=3)
    assert [first.task(i).key for i in range(25)] == [second.task(i).key for i in reversed(range(25))][::-1]


@pytest.mark.parametrize("left", [{"0", "1", "2"}, set()])
def test_every_task_of_a_large_family_is_a_candidate_if_most_are_withheld(left: set[str]) -> None:
    class Many(Ten):
        def size(self, split: Split) -> int | None:
            return 1000

    class Withheld:
        def __contains__(self, task: object) -> bool:
            return isinstance(task, Task) and task.id not in left

    schedule = GroupSchedule(Many(), seed=1, withheld=Withheld())
    if left:
        assert {schedule.task(group).id for group in range(20)} == left
    else:
        with pytest.raises(RecipeError, match="all 1000 candidates for group 0 are withheld, removed or broken"):
            schedule.task(0)


def test_a_broken_substitute_of_a_withheld_task_fails_only_its_own_groups() -> None:
    class Broken(Ten):
        def task(self, split: Split, index: int) -> Task:
            if index in (1, 2, 3):
                raise OSError("gone")
            return Ten.task(self, split, index)

    withheld = [Ten().task(Split.TRAIN, index) for index in (4, 5, 6, 7, 8)]
    schedule, own = GroupSchedule(Broken(), seed=1, withheld=withheld), GroupSchedule(Ten(), seed=1)
    for group in range(30):
        if own.task(group).id in "123":
            with pytest.raises(OSError, match="gone"):
                schedule.task(group)
        else:
            assert schedule.task(group).id in "09"


@pytest.mark.parametrize("family", [f"{__file__}:Missing", "no.such.module:X", "./absent.py:X", "nothing", "json:dumps"])
def test_unresolvable_family_raises_with_its_name(family: str) -> None:
    with pytest.raises(PluginError) as error:
        open_family(TasksConfig(family=family), seed=0)
    assert "fix" in str(error.value)


@pytest.mark.parametrize(
    "family",
    ["tables:Tables", pytest.param("reasoning:Reasoning", marks=pytest.mark.models), "pages:Pages", "pages:Questions", "desk:Desk"],
)
@pytest.mark.parametrize("limit", ["turn_tokens", "episode_tokens"])
def test_the_error_for_a_limit_of_zero_names_the_limit_and_the_options(family: str, limit: str) -> None:
    config = TasksConfig(family=Part(f"sandboxes.{family}", options={limit: 0}))
    with pytest.raises(UserError, match=rf"(?s){limit}(=0| must be positive, got 0).*fix: (correct tasks.family.options,|use kinds)"):
        open_family(config, seed=0)


class Unready(Ten):
    def __init__(self, *, seed: int) -> None:
        super().__init__()

    @property
    def name(self) -> str:
        raise RuntimeError("not ready")


@pytest.mark.parametrize("reference", [f"{__name__}:Unready", "sandboxes/loop"])
def test_every_error_while_a_family_is_opened_is_reported_with_its_reference(reference: str, tmp_path: Path) -> None:
    (tmp_path / "sandboxes").mkdir()
    (tmp_path / "sandboxes" / "loop").symlink_to("loop")
    with pytest.raises(PluginError, match=rf"tasks.family '{reference}' cannot be opened: RuntimeError"):
        open_family(TasksConfig(family=reference, verifiers=("a:b",)), seed=0, root=tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "value", "wanted"),
    [
        ("sandboxes.archive:Archive", "projects", 1.5, "a whole number"),
        ("sandboxes.archive:Archive", "entries", True, "a whole number"),
        ("sandboxes.desk:Desk", "turns", "x", "a whole number"),
        ("sandboxes.desk:Desk", "kinds", "refund", "a list of strings"),
        ("sandboxes.desk:Desk", "buttons", "false", "true or false"),
        ("sandboxes.doors:DoorTasks", "visits", 1.5, "a whole number"),
        ("sandboxes.pages:Questions", "wall_s", "x", "a number"),
        ("sandboxes.reasoning:Reasoning", "examples", 1.5, "a whole number"),
        ("sandboxes.tables:Tables", "kinds", 0, "a string"),
        ("sandboxes.networks:SortingNetwork", "budget", 1.5, "a whole number"),
        ("sandboxes.networks:SortingNetwork", "verifiers", "abc", "a list of strings"),
    ],
)
def test_an_option_of_the_wrong_type_is_an_error_with_its_name(family: str, name: str, value: object, wanted: str) -> None:
    with pytest.raises(PluginError, match=rf"tasks.family.options.{name} must be {wanted}, got "):
        open_family(TasksConfig(family=Part(family, options={name: value})), seed=0)
    open_family(TasksConfig(family=Part("sandboxes.pages:Questions", options={"wall_s": 60})), seed=0)


class Maze(Environment):
    rewards = (0.0, 1.0)

    def __init__(self, size: str = "small", depth: int = 1) -> None:
        pass


def test_an_option_of_the_environment_family_may_have_another_type_in_the_environment() -> None:
    family = open_family(TasksConfig(family=Part(f"{__name__}:Maze", options={"size": 7, "depth": 2})), seed=0)
    assert family.size(Split.TRAIN) == 7
    with pytest.raises(PluginError, match="depth must be a whole number, got 'x'"):
        open_family(TasksConfig(family=Part(f"{__name__}:Maze", options={"size": 7, "depth": "x"})), seed=0)


def test_every_image_of_a_family_has_a_spec_to_prepare() -> None:
    class Two(Ten):
        def task(self, split: Split, index: int) -> Task:
            return replace(super().task(split, index), sandbox=SandboxSpec(image=f"image-{index % 2}", memory_mb=64 + index))

    class Endless(Two):
        def size(self, split: Split) -> int | None:
            return None

    assert {spec.image for spec in sandbox_specs(Two())} == {"image-0", "image-1"} and len(sandbox_specs(Two())) == 2
    assert [spec.image for spec in sandbox_specs(Endless())] == ["image-0"]


def test_invalid_task_of_a_family_raises_task_error() -> None:
    class Broken(Ten):
        def task(self, split: Split, index: int) -> Task:
            return replace(super().task(split, index), data={"answer": float("nan")})

    with pytest.raises(TaskError, match=r"ten: train task \d cannot be created: Task.data: 'answer': nan is not a JSON number"):
        GroupSchedule(Broken(), seed=0).task(0)

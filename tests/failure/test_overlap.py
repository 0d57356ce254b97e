"""Tasks that a run with suites may train on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import RecipeError, UserError
from agentrl.failure import overlap
from agentrl.failure.case import Case, save_case
from agentrl.failure.overlap import Overlap, WithheldTasks, WithholdingLog, load_withheld, normalize_ids, overlap_of
from agentrl.protocols import TaskFamily
from agentrl.records import Limits, Message, SandboxSpec, Split, Task
from agentrl.task import GroupSchedule
from sandboxes.tables import Tables

from .traces import task

LINES = "".join(f"row {n}\n" for n in range(40))
ORDER_TASK = task("What is the status of order-10432?", "shipped", files={})
IMAGE_TASK = task("Make the tests pass.", files={}, data={"tests": ["test_a"]}, sandbox=SandboxSpec(image="bugs/one"))
FILE_TASK = task("What is the total?", "412", files={"a.csv": LINES})


def with_question(text: str, of: Task = ORDER_TASK, **changes: object) -> Task:
    return replace(of, prompt=(of.prompt[0], Message(role="user", content=text)), **changes)  # type: ignore[arg-type]


def code_task(order: str, rows: str, code: str) -> Task:
    return task(f"Which code has {order}?", code, files={"codes.csv": rows})


CODE_TASK = code_task("o-17", "o-16,aa1\no-17,zx81\n", "zx81")


@pytest.mark.parametrize(
    ("case", "other", "expected"),
    [
        (ORDER_TASK, ORDER_TASK, Overlap.SAME),
        (ORDER_TASK, replace(ORDER_TASK, id="t-2", split=Split.HELDOUT, limits=Limits(turns=9), verifiers=()), Overlap.SAME),
        (ORDER_TASK, with_question(" What is  the STATUS\nof order-10432? "), Overlap.SAME),
        (ORDER_TASK, replace(ORDER_TASK, data={"answer": "lost"}), Overlap.SAME),
        (ORDER_TASK, with_question("What is the status of order-77120?"), Overlap.TWIN),
        (ORDER_TASK, with_question("What is the status of order-77120?", data={"answer": "lost"}), None),
        (ORDER_TASK, with_question("Is order-10432 shipped?"), None),
        (ORDER_TASK, with_question("What is the status of 10433?"), None),
        (ORDER_TASK, replace(ORDER_TASK, tools=("submit",)), Overlap.TWIN),
        (FILE_TASK, replace(FILE_TASK, files={"b.csv": LINES.replace("\n", " \n")}), Overlap.TWIN),
        (FILE_TASK, replace(FILE_TASK, files={"a.csv": LINES.replace("row 7\n", "row seven\n")}), Overlap.TWIN),
        (FILE_TASK, replace(FILE_TASK, files={"a.csv": LINES.replace("row", "line")}), None),
        (FILE_TASK, replace(FILE_TASK, files={}), None),
        (FILE_TASK, replace(FILE_TASK, binary_files={"x": "AAAA"}), Overlap.TWIN),
        (task("What is 0x7f - 0x1a?", "0x65", files={}), task("What is 0x6e - 0x1a?", "0x54", files={}), None),
        (CODE_TASK, code_task("o-77", "o-3,bb2\no-77,cc4\n", "cc4"), Overlap.TWIN),
        (CODE_TASK, code_task("o-3", "o-3,bb2\no-77,cc4\n", "bb2"), None),
        (IMAGE_TASK, replace(IMAGE_TASK, sandbox=SandboxSpec(image="bugs/two")), None),
        (IMAGE_TASK, replace(IMAGE_TASK, limits=Limits(turns=9)), Overlap.SAME),
        (ORDER_TASK, replace(ORDER_TASK, sandbox=SandboxSpec(image="sandboxes/newer")), Overlap.SAME),
        (FILE_TASK, replace(FILE_TASK, sandbox=SandboxSpec(image="sandboxes/newer")), Overlap.SAME),
        (task("What is 2 + 3?", "5", files={}), task("What is 4 + 1?", "5", files={}), None),
    ],
)
def test_overlap_of_two_tasks(case: Task, other: Task, expected: Overlap | None) -> None:
    assert overlap_of(case, other) is expected and overlap_of(other, case) is expected, "in both directions"
    assert (WithheldTasks([Case(id="c", task=case)]).match(other) or (None, None))[1] is expected, "the index agrees"


def test_words_of_letters_and_digits_are_ids() -> None:
    normalized = normalize_ids(
        "Order-10432 of user_7b in T0017, 123e4567-e89b-12d3-a456-426614174000, on 2024-01-05 for 3.50 and 1,000 in sales_7.csv"
    )
    assert normalized == "# of # in #, #, on 2024-01-05 for 3.50 and 1,000 in #.csv"


def test_an_equal_task_is_preferred_to_a_near_duplicate() -> None:
    twin, same = Case(id="a", task=with_question("What is the status of order-77120?")), Case(id="b", task=ORDER_TASK)
    match = WithheldTasks([twin, same]).match(ORDER_TASK)
    assert match is not None and (match[0].id, match[1]) == ("b", Overlap.SAME)


def test_cases_do_not_withhold_all_of_a_generated_family() -> None:
    """Many questions of the quickstart have the same prompt and differ only in their files."""
    family = Tables()
    withheld = WithheldTasks(Case(id=str(n), task=family.task(Split.HELDOUT, n)) for n in range(24))
    assert sum(family.task(Split.TRAIN, n) in withheld for n in range(64)) == 0
    assert all(family.task(Split.HELDOUT, n) in withheld for n in range(24))


class Numbered:
    name = "numbered"

    def __init__(self, size: int | None, make_task: Callable[[int], Task]) -> None:
        self._size, self._make_task = size, make_task

    def size(self, split: Split) -> int | None:
        return self._size

    def task(self, split: Split, index: int) -> Task:
        return self._make_task(index)

    def gold(self, task: Task) -> str:
        return ""


def numbered(index: int) -> Task:
    return task(f"What is {index} + 1?", str(index + 1), files={}, id=str(index))


@pytest.mark.parametrize("size", [None, 8])
def test_a_run_never_trains_on_its_evaluation_tasks(size: int | None) -> None:
    family: TaskFamily = Numbered(size, numbered)
    withheld = WithheldTasks(Case(id=str(n), task=numbered(n)) for n in (1, 2, 5))
    plain, filtered = GroupSchedule(family, seed=3), GroupSchedule(family, seed=3, withheld=withheld)
    drawn = [filtered.task(group) for group in range(16)]
    assert not {task.id for task in drawn} & {"1", "2", "5"}
    assert all(
        task.id == other.id for task, other in zip(drawn, map(plain.task, range(16)), strict=True) if other.id not in ("1", "2", "5")
    )
    second = GroupSchedule(family, seed=3, withheld=withheld)
    assert [second.task(group).id for group in reversed(range(16))] == [task.id for task in reversed(drawn)], "a pure function of the index"


def test_a_withheld_task_is_recorded_once(tmp_path: Path) -> None:
    withheld = WithheldTasks(Case(id=str(n), task=numbered(n)) for n in (1, 2, 5))
    for _ in range(2):  # the second time as a resumed run
        schedule = GroupSchedule(Numbered(8, numbered), seed=3, withheld=WithholdingLog(tmp_path, withheld))
        assert not {schedule.task(group).id for group in range(16)} & {"1", "2", "5"}
    assert overlap.count_withheld(tmp_path) == 3
    lines = [json.loads(line) for line in (tmp_path / overlap.FILE).read_text().splitlines()]
    assert sorted((line["task_id"], line["case"], line["likeness"]) for line in lines) == [(n, n, "same") for n in ("1", "2", "5")]


def test_a_family_with_only_withheld_tasks_is_an_error() -> None:
    schedule = GroupSchedule(Numbered(2, numbered), seed=0, withheld=WithheldTasks(Case(id=str(n), task=numbered(n)) for n in range(2)))
    with pytest.raises(RecipeError, match=r"tasks\.withhold"):
        schedule.task(0)


def test_suite_folders_are_relative_to_the_project(tmp_path: Path) -> None:
    save_case(tmp_path / "evals" / "one", Case(id="a", task=ORDER_TASK))
    save_case(tmp_path / "evals" / "two", Case(id="b", task=FILE_TASK))
    withheld = load_withheld(["evals/one", "evals/two"], root=tmp_path)
    assert len(withheld) == 2 and ORDER_TASK in withheld and FILE_TASK in withheld and task() not in withheld
    with pytest.raises(UserError, match="no folder"):
        load_withheld(["evals/three"], root=tmp_path)

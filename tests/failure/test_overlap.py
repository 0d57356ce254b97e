"""Which tasks may be trained on in a run with suites."""

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
ASKED = task("What is the status of order-10432?", "shipped", files={})
BUGGY = task("Make the tests pass.", files={}, data={"tests": ["test_a"]}, sandbox=SandboxSpec(image="bugs/one"))
FILED = task("What is the total?", "412", files={"a.csv": LINES})


def asked(text: str, of: Task = ASKED, **changes: object) -> Task:
    return replace(of, prompt=(of.prompt[0], Message(role="user", content=text)), **changes)  # type: ignore[arg-type]


def coded(order: str, rows: str, code: str) -> Task:
    return task(f"Which code has {order}?", code, files={"codes.csv": rows})


CODED = coded("o-17", "o-16,aa1\no-17,zx81\n", "zx81")


@pytest.mark.parametrize(
    ("case", "other", "found"),
    [
        (ASKED, ASKED, Overlap.SAME),
        (ASKED, replace(ASKED, id="t-2", split=Split.HELDOUT, limits=Limits(turns=9), verifiers=()), Overlap.SAME),
        (ASKED, asked(" What is  the STATUS\nof order-10432? "), Overlap.SAME),
        (ASKED, replace(ASKED, data={"answer": "lost"}), Overlap.SAME),
        (ASKED, asked("What is the status of order-77120?"), Overlap.TWIN),
        (ASKED, asked("What is the status of order-77120?", data={"answer": "lost"}), None),
        (ASKED, asked("Is order-10432 shipped?"), None),
        (ASKED, asked("What is the status of 10433?"), None),
        (ASKED, replace(ASKED, tools=("submit",)), Overlap.TWIN),
        (FILED, replace(FILED, files={"b.csv": LINES.replace("\n", " \n")}), Overlap.TWIN),
        (FILED, replace(FILED, files={"a.csv": LINES.replace("row 7\n", "row seven\n")}), Overlap.TWIN),
        (FILED, replace(FILED, files={"a.csv": LINES.replace("row", "line")}), None),
        (FILED, replace(FILED, files={}), None),
        (FILED, replace(FILED, binary_files={"x": "AAAA"}), Overlap.TWIN),
        (task("What is 0x7f - 0x1a?", "0x65", files={}), task("What is 0x6e - 0x1a?", "0x54", files={}), None),
        (CODED, coded("o-77", "o-3,bb2\no-77,cc4\n", "cc4"), Overlap.TWIN),
        (CODED, coded("o-3", "o-3,bb2\no-77,cc4\n", "bb2"), None),
        (BUGGY, replace(BUGGY, sandbox=SandboxSpec(image="bugs/two")), None),
        (BUGGY, replace(BUGGY, limits=Limits(turns=9)), Overlap.SAME),
        (ASKED, replace(ASKED, sandbox=SandboxSpec(image="sandboxes/newer")), Overlap.SAME),
        (FILED, replace(FILED, sandbox=SandboxSpec(image="sandboxes/newer")), Overlap.SAME),
        (task("What is 2 + 3?", "5", files={}), task("What is 4 + 1?", "5", files={}), None),
    ],
)
def test_overlap(case: Task, other: Task, found: Overlap | None) -> None:
    assert overlap_of(case, other) is found and overlap_of(other, case) is found, "either way round"
    assert (WithheldTasks([Case(id="c", task=case)]).match(other) or (None, None))[1] is found, "and so says the index"


def test_ids_are_words_of_letters_and_digits() -> None:
    folded = normalize_ids(
        "Order-10432 of user_7b in T0017, 123e4567-e89b-12d3-a456-426614174000, on 2024-01-05 for 3.50 and 1,000 in sales_7.csv"
    )
    assert folded == "# of # in #, #, on 2024-01-05 for 3.50 and 1,000 in #.csv"


def test_an_equal_task_is_preferred_to_a_near_duplicate() -> None:
    twin, same = Case(id="a", task=asked("What is the status of order-77120?")), Case(id="b", task=ASKED)
    found = WithheldTasks([twin, same]).match(ASKED)
    assert found is not None and (found[0].id, found[1]) == ("b", Overlap.SAME)


def test_cases_do_not_withhold_a_whole_generated_family() -> None:
    """Many questions of the quickstart have the same prompt and differ only in their files."""
    family = Tables()
    held = WithheldTasks(Case(id=str(n), task=family.task(Split.HELDOUT, n)) for n in range(24))
    assert sum(family.task(Split.TRAIN, n) in held for n in range(64)) == 0
    assert all(family.task(Split.HELDOUT, n) in held for n in range(24))


class Numbered:
    name = "numbered"

    def __init__(self, size: int | None, made: Callable[[int], Task]) -> None:
        self._size, self._made = size, made

    def size(self, split: Split) -> int | None:
        return self._size

    def task(self, split: Split, index: int) -> Task:
        return self._made(index)

    def gold(self, task: Task) -> str:
        return ""


def numbered(index: int) -> Task:
    return task(f"What is {index} + 1?", str(index + 1), files={}, id=str(index))


@pytest.mark.parametrize("size", [None, 8])
def test_a_run_never_trains_on_what_it_is_evaluated_on(size: int | None) -> None:
    family: TaskFamily = Numbered(size, numbered)
    held = WithheldTasks(Case(id=str(n), task=numbered(n)) for n in (1, 2, 5))
    plain, kept = GroupSchedule(family, seed=3), GroupSchedule(family, seed=3, withheld=held)
    given = [kept.task(group) for group in range(16)]
    assert not {one.id for one in given} & {"1", "2", "5"}
    assert all(
        mine.id == other.id for mine, other in zip(given, map(plain.task, range(16)), strict=True) if other.id not in ("1", "2", "5")
    )
    again = GroupSchedule(family, seed=3, withheld=held)
    assert [again.task(group).id for group in reversed(range(16))] == [one.id for one in reversed(given)], "a pure function of the index"


def test_a_withheld_task_is_recorded_once(tmp_path: Path) -> None:
    held = WithheldTasks(Case(id=str(n), task=numbered(n)) for n in (1, 2, 5))
    for _ in range(2):  # the second time as a resumed run
        schedule = GroupSchedule(Numbered(8, numbered), seed=3, withheld=WithholdingLog(tmp_path, held))
        assert not {schedule.task(group).id for group in range(16)} & {"1", "2", "5"}
    assert overlap.count_withheld(tmp_path) == 3
    lines = [json.loads(line) for line in (tmp_path / overlap.FILE).read_text().splitlines()]
    assert sorted((line["task_id"], line["case"], line["likeness"]) for line in lines) == [(n, n, "same") for n in ("1", "2", "5")]


def test_a_family_with_only_withheld_tasks_is_an_error() -> None:
    schedule = GroupSchedule(Numbered(2, numbered), seed=0, withheld=WithheldTasks(Case(id=str(n), task=numbered(n)) for n in range(2)))
    with pytest.raises(RecipeError, match=r"tasks\.withhold"):
        schedule.task(0)


def test_suite_folders_are_relative_to_the_project(tmp_path: Path) -> None:
    save_case(tmp_path / "evals" / "one", Case(id="a", task=ASKED))
    save_case(tmp_path / "evals" / "two", Case(id="b", task=FILED))
    held = load_withheld(["evals/one", "evals/two"], root=tmp_path)
    assert len(held) == 2 and ASKED in held and FILED in held and task() not in held
    with pytest.raises(UserError, match="no folder"):
        load_withheld(["evals/three"], root=tmp_path)

"""Practice: derived from cases without overlapping them, and mixed into a run's groups."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import TasksConfig, build
from agentrl.errors import RecipeError, TaskError, UserError
from agentrl.failure.case import Case, save_case
from agentrl.failure.overlap import WithheldTasks, load_withheld, overlap_of
from agentrl.failure.practice import (
    FILE,
    PracticeSchedule,
    PracticeTask,
    gold_without_answer,
    load_practice,
    mutate_task,
    open_practice,
    practice_task,
    save_practice,
)
from agentrl.records import Split, Task
from agentrl.reward import TaskScorer
from agentrl.session import run_practice
from agentrl.task import GroupSchedule
from sandboxes.tables import Tables
from sandboxes.tables.demonstrations import run_template
from sandboxes.tables.kinds import KINDS
from sandboxes.tables.names import belongs

FAMILY = Tables(seed=0)
CASES = [Case(id=f"c{index}", task=FAMILY.task(Split.HELDOUT, index)) for index in range(len(KINDS))]


def tasks_of(case: Case, count: int = 6) -> list[PracticeTask]:
    return [practice_task(case, how, task) for how, task in islice(FAMILY.variants(case.task, seed=0), count)]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for case in CASES[:3]:
        save_case(tmp_path / "suite", case)
    return tmp_path / "suite"


@pytest.mark.parametrize("case", CASES, ids=[kind.name for kind in KINDS])
def test_variants_have_the_cases_kind_and_do_not_overlap_with_it(case: Case) -> None:
    variants = tasks_of(case, 9)
    assert variants == tasks_of(case, 9), "a pure function"
    assert {variant.how for variant in variants} == {"alike", "harder", "easier"} and len({variant.key for variant in variants}) == 9
    for variant in variants:
        assert variant.task.data["kind"] == case.task.data["kind"] and variant.task.split is Split.TRAIN
        assert overlap_of(case.task, variant.task) is None
        assert run_template(FAMILY.gold(variant.task), variant.task.files).startswith(str(variant.task.data["answer"])[:3])
        assert all(belongs(word) is Split.TRAIN for word in [path.partition(".")[0] for path in variant.task.files] if word.isalpha())
    rows = {how: [text.count("\n") for v in variants if v.how == how for text in v.task.files.values()] for how in ("harder", "easier")}
    assert min(rows["harder"]) > max(rows["easier"])


def test_mutants_have_the_same_prompt_and_other_numbers() -> None:
    task = FAMILY.task(Split.TRAIN, 2)  # a total with a condition on a number, which the question states
    mutants = list(islice(mutate_task(task, seed=0), 5))
    assert mutants == list(islice(mutate_task(task, seed=0), 5)) and len({mutant.key for mutant in mutants}) == 5
    gold_without_answer(FAMILY, task)
    answers = {run_template(FAMILY.gold(mutant), mutant.files) for mutant in mutants}
    assert len(answers) == 5 and str(task.data["answer"]) not in answers
    assert all(mutant.prompt == task.prompt and overlap_of(task, mutant) is None for mutant in mutants)
    assert list(mutate_task(replace(task, files={"a.txt": "no number, but id-7 and 2024-01-05\n"}), seed=0)) == []


def test_mutants_are_endless_and_replace_numbers_one_to_one() -> None:
    task = replace(FAMILY.task(Split.TRAIN, 2), files={"a.txt": "total 5\n"})
    for seed in range(20):
        mutants = list(islice(mutate_task(task, seed=seed), 30))
        assert len(mutants) == 30 and all(mutant.files != task.files for mutant in mutants)
    numbers = [*map(str, range(10)), *(f"0{digit}" for digit in range(10)), "0.1", "0.2", "7.5"]
    crowded = replace(task, files={"a.txt": " ".join(numbers)})
    for mutant in islice(mutate_task(crowded, seed=0), 30):
        replaced = mutant.files["a.txt"].split()
        assert len(set(replaced)) == len(numbers) and [len(text) for text in replaced] == [len(text) for text in numbers]


def test_a_gold_solution_that_depends_on_the_answer_is_rejected() -> None:
    class PrintsAnswer(Tables):
        def gold(self, task: Task) -> str:
            return f"print({task.data['answer']!r})"

    with pytest.raises(TaskError, match="depends on the answer"):
        gold_without_answer(PrintsAnswer(), CASES[0].task)
    with pytest.raises(TaskError, match="no answer in its data"):
        gold_without_answer(FAMILY, replace(CASES[0].task, data={"kind": "total", "names": {}}))


def test_practice_is_read_back_and_overlapping_tasks_are_an_error(suite: Path) -> None:
    practice = [variant for case in CASES[:3] for variant in tasks_of(case)]
    save_practice(suite, practice, {"seed": 0})
    cases = load_withheld([suite.name], root=suite.parent)
    assert list(load_practice(suite, withheld=cases)) == practice
    leaked = practice_task(CASES[1], "alike", replace(CASES[1].task, id="other", split=Split.TRAIN))
    save_practice(suite, [*practice, leaked], {})
    with pytest.raises(UserError, match=r"line 20: task 'other' overlaps \(same\) with case c1"):
        load_practice(suite, withheld=cases)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}", "is not a practice task"),
        (b"[" * 100_000, "is not a practice task"),
        (json.dumps({"case": "c", "how": "x", "key": "0", "task": None}).encode(), "is not a practice task"),
    ],
)
def test_the_error_for_a_damaged_line_has_its_number(suite: Path, line: bytes, message: str) -> None:
    save_practice(suite, tasks_of(CASES[0]), {})
    path = suite / FILE
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=f"line 8.*{message}"):
        load_practice(suite)


def test_a_task_changed_after_its_proof_is_an_error(suite: Path) -> None:
    save_practice(suite, tasks_of(CASES[0]), {})
    path = suite / FILE
    path.write_text(path.read_text().replace('"tolerance":0.0051', '"tolerance":9.0'))
    with pytest.raises(UserError, match="differs from the task that was proven"):
        load_practice(suite)
    path.write_text('{"format": 2}\n')
    with pytest.raises(UserError, match="format 2"):
        load_practice(suite)
    path.unlink()
    with pytest.raises(UserError, match="has no practice"):
        load_practice(suite)
    heldout = replace(tasks_of(CASES[0])[0].task, split=Split.HELDOUT)
    save_practice(suite, [practice_task(CASES[0], "alike", heldout)], {})
    with pytest.raises(UserError, match="never used for training"):
        load_practice(suite)


@given(st.fractions(min_value="1/1000", max_value=1, max_denominator=1000), st.integers(0, 3000), st.integers(0, 9))
def test_the_practice_share_is_exact_after_every_group(share: Fraction, groups: int, seed: int) -> None:
    mixed = PracticeSchedule([["a"] * 1], [1], share, seed)  # type: ignore[list-item]
    assert mixed.practice_groups_before(groups) == int(groups * share)
    assert (mixed.task_of_group(groups) is not None) == (mixed.practice_groups_before(groups + 1) > mixed.practice_groups_before(groups))


def test_suites_alternate_by_weight_and_the_family_keeps_its_schedule() -> None:
    first, second = [practice.task for practice in tasks_of(CASES[0], 4)], [practice.task for practice in tasks_of(CASES[1], 3)]
    schedule = GroupSchedule(FAMILY, 3, practice=PracticeSchedule([first, second], [3, 1], Fraction(3, 10), 3))
    drawn = [schedule.task(group) for group in range(200)]
    assert drawn == [schedule.task(group) for group in range(200)]
    counts = Counter(task.id for task in drawn if "like" in task.id)
    assert sum(counts.values()) == 60
    assert {counts[task.id] for task in first} <= {11, 12} and sum(counts[task.id] for task in first) == 45
    assert {counts[task.id] for task in second} == {5}
    family_tasks = [task for task in drawn if "like" not in task.id]
    assert family_tasks == [FAMILY.task(Split.TRAIN, index) for index in range(140)]


def test_a_recipe_sets_weights_of_suites(suite: Path) -> None:
    save_practice(suite, tasks_of(CASES[0]), {})
    config = TasksConfig(family="f:F", practice={"suite": 2}, practice_share=0.25)
    schedule = open_practice(config, seed=0, root=suite.parent, withheld=WithheldTasks(CASES))
    assert schedule.share == Fraction(1, 4) and schedule.weights == (2,) and len(schedule.tasks[0]) == 6
    for wrong, message in (
        ({"practice": {"a": 0}}, "practice.a"),
        ({"practice": {"a": 1}, "practice_share": 0}, "practice_share"),
        ({"practice_share": 0.5}, "does nothing without practice tasks"),
    ):
        with pytest.raises(RecipeError, match=message):
            build({"name": "x", "policy": {"model": "m"}, "tasks": {"family": "f:F", **wrong}})


def test_practice_never_overlaps_with_evaluations_and_stays_the_same_on_resume(suite: Path, tmp_path: Path) -> None:
    recipe = build({
        "name": "x",
        "policy": {"model": "m"},
        "tasks": {"family": "sandboxes.tables:Tables", "practice": {"suite": 1}},
        "evaluation": {"heldout": 5, "heldout_real": 0},
    })  # fmt: skip
    run, scorer = tmp_path / "run", TaskScorer(root=Path.cwd())

    def open_schedule() -> tuple[PracticeSchedule | None, tuple[str, ...]]:
        return run_practice.open_run_practice(recipe, FAMILY, scorer, WithheldTasks(CASES[:3]), root=tmp_path, folder=run)

    save_practice(suite, tasks_of(CASES[0]), {})
    first, notes = open_schedule()
    assert first is not None and "generated from 3 cases that are among the 5 held-out tasks" in notes[0]
    run_practice.copy_practice_files(run, recipe, root=tmp_path)
    overlapping = practice_task(CASES[0], "alike", replace(CASES[4].task, id="other", split=Split.TRAIN))
    save_practice(suite, [overlapping], {})
    assert open_schedule()[0] == first, "a started run continues with its own copy"
    run_practice.copy_practice_files(run, recipe, root=tmp_path)
    assert len((run / "practice" / "0-suite.jsonl").read_bytes().splitlines()) == 7
    (run / "practice" / "0-suite.jsonl").unlink()
    with pytest.raises(UserError, match=r"overlaps \(same\) with case heldout-4, on which the run is evaluated"):
        open_schedule()

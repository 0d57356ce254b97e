"""The tables family: pure tasks, disjoint splits, right gold solutions, and wrong sloppy programs."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from agentrl.errors import UserError
from agentrl.protocols import TaskFamily
from agentrl.records import Episode, Split, Task
from rewards.tables import exact_answer
from sandboxes.tables import REAL_TASKS, Tables
from sandboxes.tables.demonstrations import run_template
from sandboxes.tables.kinds import BY_NAME, KINDS
from sandboxes.tables.names import ENGLISH, Names, belongs

FAMILY: TaskFamily = Tables(seed=0)
GENERATED = (Split.TRAIN, Split.HELDOUT)


@cache
def task(split: Split, index: int) -> Task:
    """Returns a cached task. Another test checks that a new task is the same."""
    return FAMILY.task(split, index)


def tasks(split: Split, count: int) -> list[Task]:
    return [task(split, index) for index in range(count)]


async def value(task: Task, answer: str) -> float | None:
    episode = Episode(id="e", task_id=task.id, task_key=task.key, trajectories=(), answer=answer)
    return (await exact_answer(task, episode)).value


@pytest.mark.sampled(3)
@pytest.mark.parametrize("split", list(Split))
def test_a_task_is_a_pure_function_of_seed_split_and_index(split: Split) -> None:
    keys = [FAMILY.task(split, index).key for index in (0, 7, 100)]
    assert [Tables(seed=0).task(split, index).key for index in (100, 7, 0)] == keys[::-1]
    assert Tables(seed=1).task(split, 7).key != keys[1]


def test_a_task_is_the_same_in_another_process() -> None:
    code = "from agentrl.records import Split; from sandboxes.tables import Tables; print(Tables(3).task(Split.TRAIN, 5).key)"
    root = Path(__file__).resolve().parents[2]
    key = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    assert key == Tables(3).task(Split.TRAIN, 5).key


@pytest.mark.sampled(3)
@pytest.mark.parametrize("split", list(Split))
async def test_gold_solution_is_right_and_sloppy_programs_are_wrong(split: Split) -> None:
    for task in tasks(split, 120):
        kind, names = BY_NAME[task.data["kind"]], task.data["names"]
        assert await value(task, run_template(FAMILY.gold(task), task.files)) == 1.0, task.prompt[0].content
        for sloppy in kind.sloppy:
            assert await value(task, run_template(kind.program(names, sloppy), task.files)) == 0.0, (task.id, sloppy)


@pytest.mark.slow
async def test_gold_programs_of_every_kind_run_under_a_real_interpreter(tmp_path: Path) -> None:
    for task in (*tasks(Split.HELDOUT, len(KINDS)), *tasks(Split.HELDOUT_REAL, len(KINDS))):
        for path, text in task.files.items():
            (tmp_path / path).write_text(text, encoding="utf-8")
        command = [sys.executable, "-I", "-X", "utf8", "-c", FAMILY.gold(task)]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=300)
        assert await value(task, process.stdout) == 1.0, process.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("split", list(Split))
def test_files_are_small_and_every_kind_appears(split: Split) -> None:
    drawn = tasks(split, 240)
    sizes = [sum(len(text.encode()) for text in task.files.values()) for task in drawn]
    assert min(sizes) > 50 and max(sizes) < 4000
    assert {task.data["kind"] for task in drawn} == {kind.name for kind in KINDS}
    assert {path.rsplit(".", 1)[1] for task in drawn for path in task.files} == {"csv", "json", "txt"}


def test_the_truth_never_enters_the_sandbox() -> None:
    for task in tasks(Split.HELDOUT, 120):
        assert task.data["kind"] not in "".join(task.files)
        assert set(task.files) == {task.data["names"][name] for name in ("f", "o") if name in task.data["names"]}


@pytest.mark.slow
def test_splits_share_no_file_and_no_word_in_a_name() -> None:
    drawn = {split: tasks(split, REAL_TASKS) for split in Split}
    contents = {split: {text for task in drawn[split] for text in task.files.values()} for split in Split}
    paths = {split: {path for task in drawn[split] for path in task.files} for split in Split}
    for a, b in combinations(Split, 2):
        assert contents[a].isdisjoint(contents[b])
        assert paths[a].isdisjoint(paths[b])
    names = [
        {name for task in drawn[split] for key, name in task.data["names"].items() if key in "cgkvd" and not name.isdigit()}
        for split in GENERATED
    ]
    assert names[0].isdisjoint(names[1])


@pytest.mark.parametrize("split", GENERATED)
@pytest.mark.parametrize("wild", [False, True])
def test_generated_words_belong_to_their_split(split: Split, wild: bool) -> None:
    names = Names(Random(0), split, wild=wild)
    assert all(belongs(names.word()) is split for _ in range(500))
    assert 0.15 < sum(belongs(word) is Split.HELDOUT for word in ENGLISH) / len(ENGLISH) < 0.35


@pytest.mark.slow
def test_real_tasks_are_many_and_use_the_tables_names() -> None:
    drawn = tasks(Split.HELDOUT_REAL, REAL_TASKS)
    assert len({(task.prompt[0].content, *task.files.values()) for task in drawn}) >= 200
    text = "\n".join(task.prompt[0].content for task in drawn)
    for name in ("sepal length (cm)", "malic_acid", "worst area", "withdrawal_date", "country_code", "Situps", "bmi"):
        assert f"'{name}'" in text


def test_index_outside_the_split_raises() -> None:
    for split, index in ((Split.TRAIN, -1), (Split.HELDOUT_REAL, REAL_TASKS)):
        with pytest.raises(UserError, match="use an index from 0"):
            FAMILY.task(split, index)


def test_names_in_a_question_are_quoted_as_in_the_program() -> None:
    for task in tasks(Split.HELDOUT_REAL, 120):
        for quoted in re.findall(r"'[^']*'", task.prompt[0].content):
            assert quoted in FAMILY.gold(task)

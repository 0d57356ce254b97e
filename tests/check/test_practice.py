"""Generating practice in real sandboxes: each task is proven or rejected with a reason."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from agentrl.check.practice import PracticeReport, generate_practice
from agentrl.cli import app
from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.failure.case import Case, Suite, save_case
from agentrl.failure.overlap import WithheldTasks, load_withheld
from agentrl.failure.practice import load_practice, mutate_task
from agentrl.protocols import SandboxBackend
from agentrl.records import SandboxSpec, Split, Task
from agentrl.sandbox import open_sandboxes
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from sandboxes.tables import Tables

ROOT = Path(__file__).resolve().parents[2]
FAMILY = Tables(seed=0)


class Plain:
    """A family with the tasks of `tables` but without variants."""

    name = "tables"

    def size(self, split: Split) -> int | None:
        return FAMILY.size(split)

    def task(self, split: Split, index: int) -> Task:
        return FAMILY.task(split, index)

    def gold(self, task: Task) -> str:
        return FAMILY.gold(task)


class PrintsAnswer(Plain):
    """A family whose gold solution prints the given answer."""

    def gold(self, task: Task) -> str:
        return f"print({task.data['answer']!r})"


async def generate(family: Plain | Tables, sandboxes: SandboxBackend, *tasks: Task, count: int = 2) -> PracticeReport:
    cases = tuple(Case(id=f"c{number}", task=task) for number, task in enumerate(tasks))
    suite = Suite(folder=Path("suite"), name="suite", cases=cases)
    return await generate_practice(suite, family, sandboxes, withheld=WithheldTasks(cases), count=count, seed=0, root=ROOT, quiet=True)


@pytest.mark.slow
@pytest.mark.bubblewrap
async def test_mutants_are_proven_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[threading.Thread]()

    def mutate(task: Task, *, seed: int) -> Iterator[Task]:
        for mutant in mutate_task(task, seed=seed):
            threads.add(threading.current_thread())
            yield mutant

    monkeypatch.setattr("agentrl.check.practice.mutate_task", mutate)
    total, foreign = FAMILY.task(Split.HELDOUT, 0), replace(FAMILY.task(Split.HELDOUT, 1), family="other")
    wrong_answer = replace(total, data={**total.data, "answer": "1"})
    sandboxes = await open_sandboxes(SandboxConfig(backend="bubblewrap"), warm=0, run_label="test", root=ROOT)
    try:
        report = await generate(Plain(), sandboxes, total, foreign, wrong_answer)
        leaky_report = await generate(PrintsAnswer(), sandboxes, total)
    finally:
        await sandboxes.close()
    assert [(practice.case, practice.how) for practice in report.tasks] == [("c0", "mutated")] * 2
    assert all(practice.task.data["answer"] != total.data["answer"] and practice.task.split is Split.TRAIN for practice in report.tasks)
    assert [case for case, _ in report.rejected] == ["c1", "c2"]
    assert "belongs to family 'other'" in report.rejected[0][1] and "does not solve the case" in report.rejected[1][1]
    assert threads and threading.main_thread() not in threads, "a task may have so many numbers that a mutant takes seconds"
    assert leaky_report.tasks == () and "depends on the answer" in leaky_report.rejected[0][1]


@pytest.mark.bubblewrap
def test_the_command_writes_practice_that_a_run_accepts(tmp_path: Path) -> None:
    for index in (3, 4):
        save_case(tmp_path / "suite", Case(id=f"c{index}", task=FAMILY.task(Split.HELDOUT, index)))
    arguments = ["practice", str(tmp_path / "suite"), str(ROOT / "recipes" / "quickstart.py"), "sandbox.backend=bubblewrap", "--count", "3"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["tasks"] == 6 and report["refused"] == [] and report["cases"]["c3"] == {"alike": 1, "harder": 1, "easier": 1}
    tasks = load_practice(tmp_path / "suite", withheld=load_withheld(["suite"], root=tmp_path))
    assert [practice.task.data["kind"] for practice in tasks] == ["average"] * 3 + ["extreme"] * 3


async def test_variants_are_drawn_in_the_thread_that_opened_the_family() -> None:
    """An SQLite connection can only be used in the thread that opened it."""

    class FromDatabase(Plain):
        def __init__(self) -> None:
            self.database = sqlite3.connect(":memory:")

        def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
            for (index,) in self.database.execute("VALUES (0), (1), (2)"):
                yield "alike", FAMILY.task(Split.TRAIN, index)

    with contextlib.closing((family := FromDatabase()).database):
        report = await generate(family, ScriptedSandboxes(printing("")), FAMILY.task(Split.HELDOUT, 0))
    assert "alike" in dict(report.rejected)["c0"], "the variants are drawn; their gold solutions print nothing here"


async def test_a_failure_of_the_sandboxes_is_raised_and_never_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(ScriptedSandboxes):
        async def open(self, *_: object, **__: object) -> NoReturn:
            raise SandboxError("the daemon is gone")

    class Absent(ScriptedSandboxes):
        async def prepare(self, spec: SandboxSpec) -> None:
            raise SandboxUnavailable("no daemon answers")

    class Varied(Plain):
        def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
            for index in range(20):
                yield "alike", replace(FAMILY.task(Split.TRAIN, index), sandbox=SandboxSpec(image="only-of-variants"))

    class LosesDaemon(ScriptedSandboxes):
        def __init__(self, *, at_open: bool) -> None:
            super().__init__(printing(""))
            self.at_open = at_open

        async def prepare(self, spec: SandboxSpec) -> None:
            if spec.image == "only-of-variants" and not self.at_open:
                raise SandboxUnavailable("no daemon answers")

        async def open(self, *_: object, **__: object) -> NoReturn:
            raise SandboxUnavailable("no daemon answers")

    monkeypatch.setattr("agentrl.check.verifiers.RETRIES", 0)
    for at_open in (False, True):
        with pytest.raises(SandboxUnavailable, match="no daemon answers"):
            await generate(Varied(), LosesDaemon(at_open=at_open), FAMILY.task(Split.HELDOUT, 0))
    for family in (Plain(), FAMILY):  # without and with variants
        with pytest.raises(SandboxError, match="the daemon is gone"):
            await generate(family, Dead(printing("")), FAMILY.task(Split.HELDOUT, 0))
        with pytest.raises(SandboxUnavailable, match="no daemon answers"):
            await generate(family, Absent(printing("")), FAMILY.task(Split.HELDOUT, 0))

"""Sandboxes whose programs sleep first, and the family whose programs are submitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import ToolOutcome, load_tools
from agentrl.errors import UserError
from agentrl.records import Episode, ExecResult, SandboxSpec, Split, Task, Trajectory
from agentrl.testing import ScriptedSandboxes
from benchmarks.contest import slow
from benchmarks.contest.single import SingleTurn, hand_in, printed
from sandboxes.tables import Tables

SPEC = SandboxSpec(image="sandboxes/tables")


@pytest.fixture
def programs_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that the inner backend runs."""
    programs: list[str] = []

    def answer(code: str) -> ExecResult:
        programs.append(code)
        return ExecResult(exit_code=0, stdout="", stderr="", wall_s=0.0)

    monkeypatch.setattr(slow, "select_backend", lambda name, **_: ScriptedSandboxes(answer))
    return programs


async def test_every_program_sleeps_in_its_sandbox_first(programs_run: list[str]) -> None:
    backend = slow.SlowBackend(root=Path(), run_label="t", low=0.2, high=2.0)
    sandbox = await backend.open(SPEC, files={"a": b"1"})
    await sandbox.python("print(1)", timeout_s=1.0)
    await sandbox.exec(["make"], timeout_s=1.0)
    assert await sandbox.read("a", max_bytes=9) == b"1"
    assert [program.split()[0] for program in programs_run] == ["sleep", "print(1)", "sleep", "make"]
    assert float(programs_run[0].split()[1]) == pytest.approx(slow.seconds_of("print(1)", 0.2, 2.0), abs=1e-3)
    await sandbox.close()


def test_the_wait_of_a_program_depends_on_its_text_and_is_within_the_interval() -> None:
    waits = [slow.seconds_of(f"print({n})", 0.2, 2.0) for n in range(500)]
    assert waits[3] == slow.seconds_of("print(3)", 0.2, 2.0)
    assert 0.2 <= min(waits) < 0.3 and 1.9 < max(waits) <= 2.0
    assert abs(sum(waits) / 500 - 1.1) < 0.1


@pytest.mark.parametrize(("low", "high"), [(2.0, 0.2), (-1.0, 1.0), (0.0, 0.0)])
def test_an_invalid_interval_raises_an_error(programs_run: list[str], low: float, high: float) -> None:
    with pytest.raises(UserError, match="a wait of"):
        slow.SlowBackend(root=Path(), run_label="t", low=low, high=high)


def episode_with(task: Task, answer: str | None) -> Episode:
    line = Trajectory(agent="main", turns=(), stop_reason="submitted")
    return Episode(id="e", task_id=task.id, task_key=task.key, trajectories=(line,), answer=answer)


def test_a_single_turn_has_the_same_prompt_and_ends_with_the_program() -> None:
    plain, single = Tables(seed=3).task(Split.TRAIN, 5), SingleTurn(seed=3, of="sandboxes.tables:Tables").task(Split.TRAIN, 5)
    assert single.prompt == plain.prompt and single.files == plain.files and single.limits.turns == 1
    schemas = [[tool.schema for tool in load_tools(task.tools).values()] for task in (plain, single)]
    assert schemas[0] == schemas[1], "the policy sees the same tools"


async def test_the_output_of_the_program_is_scored_by_the_family() -> None:
    task = SingleTurn(seed=0, of="sandboxes.tables:Tables").task(Split.TRAIN, 2)

    async def score(answer: str | None, **result: Any) -> float | None:
        result_fields = {"exit_code": 0, "stdout": "", "stderr": "", "wall_s": 0.0} | result
        backend = ScriptedSandboxes(lambda code: ExecResult(**result_fields))
        value = (await printed(task, episode_with(task, answer), backend)).value
        assert all(sandbox.closed for sandbox in backend.opened)
        return value

    correct_output = f"{task.data['answer']}\n"
    assert await score("print(...)", stdout=correct_output) == 1.0
    assert await score("print(...)", stdout="no") == 0.0
    assert await score("print(...)", stdout=correct_output, exit_code=1) == 0.0, "the output of a failed program does not count"
    assert await score(None, stdout=correct_output) == 0.0


async def test_a_submitted_program_is_the_answer() -> None:
    limits = replace(Tables(seed=0).limits)
    assert await hand_in({"code": "print(1)"}, None, limits) == ToolOutcome(output="handed in", ok=True, answer="print(1)")
    assert not (await hand_in({"text": "print(1)"}, None, limits)).ok

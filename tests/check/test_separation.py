"""Modes in which tests share a sandbox with the code under test are reported as unsafe for training, and the check still passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.check.access import SHARED_SANDBOX_RISKS, prove_separation
from agentrl.check.report import CheckReport, render
from agentrl.records import Split
from agentrl.task import TaskFolders
from tests.judging import task

ROOT = Path(__file__).resolve().parents[2]


def test_shipped_family_reports_unsafe_tasks() -> None:
    family = TaskFolders(ROOT / "sandboxes" / "chores", root=ROOT)
    tasks = [family.task(split, index) for split in Split for index in range(family.size(split) or 0)]
    proof = prove_separation([*tasks, task(answer="1")])
    assert proof.ok and proof.looked_at == f"{len(tasks)} graded tasks"
    unsafe = {name for finding in proof.findings for name in finding.tasks}
    assert {finding.severity for finding in proof.findings} == {"unsafe"} and len(unsafe) == 2
    assert any("roman-numerals" in name for name in unsafe)
    text = render(CheckReport(cases=(), proofs=(proof,), not_proven=()))
    assert "UNSAFE  code under test runs apart from its tests" in text and "unsafe: not for training: mode pytest of " in text


@pytest.mark.parametrize("mode", ["judge", *SHARED_SANDBOX_RISKS])
def test_every_mode_but_judge_is_unsafe(mode: str) -> None:
    tests = {"test.sh": "ZXhpdCAw"} if mode in ("shell", "harbor") else {"test_a.py": "ZGVmIHRlc3RfYSgpOiBwYXNz"}
    graded = replace(task(), data={"grading": {"mode": mode, "tests": tests}})
    assert bool(prove_separation([graded]).findings) == (mode != "judge")

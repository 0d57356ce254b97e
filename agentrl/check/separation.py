"""Checks that an agent's code runs in another sandbox than its tests. If not, a policy in training can learn to cheat."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.check.findings import Finding, Proof, join_examples, plural
from agentrl.errors import TaskError
from agentrl.records import Task
from agentrl.task.grading import GRADING_KEY, grading_of

SHARED_SANDBOX_RISKS = {
    "pytest": "the code under test shares a process with the tests: it can read the expected values and change what is compared",
    "shell": "the code under test shares a sandbox with test.sh: it can read the expected values and write into the shell's memory",
    "harbor": "the code under test shares a sandbox with the verdict: it can write the reward file",
}
"""Modes of grading in which tests and the code under test share a sandbox, and what that allows."""


def prove_separation(tasks: Sequence[Task]) -> Proof:
    """Marks tasks whose tests share a sandbox with the code under test as unsafe for training. Their scores are still correct."""
    modes: dict[str, list[str]] = {}
    graded = 0
    for task in tasks:
        if GRADING_KEY not in task.data:
            continue
        try:
            mode = grading_of(task).mode
        except TaskError:  # the cases report it
            continue
        graded += 1
        if mode in SHARED_SANDBOX_RISKS:
            modes.setdefault(mode, []).append(task.id)
    findings = [
        Finding(
            severity="unsafe",
            what=f'not for training: mode {mode} of {join_examples(names)}: {SHARED_SANDBOX_RISKS[mode]}; use verifier.mode = "judge"',
            tasks=tuple(names),
        )
        for mode, names in sorted(modes.items())
    ]
    return Proof(name="code under test runs apart from its tests", looked_at=plural(graded, "graded task"), findings=tuple(findings))

"""Checks that an agent's code runs in another sandbox than its tests. Otherwise a policy can learn to cheat in training."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.contract.grading import KEY, grading_of
from agentrl.errors import TaskError
from agentrl.prove.findings import Finding, Proof, examples, plural
from agentrl.records import Task

WAYS = {
    "pytest": "the code under test shares a process with the tests: it can read the expected values and change what is compared",
    "shell": "the code under test shares a sandbox with test.sh: it can read the expected values and write into the shell's memory",
    "harbor": "the code under test shares a sandbox with the verdict: it can write the reward file",
}
"""Modes of grading in which tests and code under test share a sandbox -> the risk."""


def prove_separation(tasks: Sequence[Task]) -> Proof:
    """Reports tasks whose tests share a sandbox with the code under test as unsafe for training. Their scores are still correct."""
    modes: dict[str, list[str]] = {}
    graded = 0
    for task in tasks:
        if KEY not in task.data:
            continue
        try:
            mode = grading_of(task).mode
        except TaskError:  # the cases report it
            continue
        graded += 1
        if mode in WAYS:
            modes.setdefault(mode, []).append(task.id)
    findings = [
        Finding(
            severity="unsafe",
            what=f'not for training: mode {mode} of {examples(names)}: {WAYS[mode]}; use verifier.mode = "judge"',
            tasks=tuple(names),
        )
        for mode, names in sorted(modes.items())
    ]
    return Proof(name="code under test runs apart from its tests", looked_at=plural(graded, "graded task"), findings=tuple(findings))

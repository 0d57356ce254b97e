"""Findings of `agentrl check` about answers that the agent could read; `agentrl.task.leaks` says what they are."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.check.findings import Finding, join_examples, plural, shorten, unique
from agentrl.task.leaks import Leak


def leak_findings(leaks_of: Mapping[str, list[Leak]], where: str) -> list[Finding]:
    """Findings over all tasks (id -> leaks): one for sure leaks, one for the others."""
    findings: list[Finding] = []
    for sure in (True, False):
        of_kind = {task: [leak for leak in some if leak.certain is sure] for task, some in leaks_of.items()}
        of_kind = {task: some for task, some in of_kind.items() if some}
        if not of_kind:
            continue
        texts = [
            f"{task}: {leak.path} {leak.how} {leak.truth.origin} {shorten(leak.truth.text, 40)!r}"
            for task, some in of_kind.items()
            for leak in some[:1]
        ]
        more = "" if sure else ", which is right if the agent should look it up"
        what = f"the truth of {plural(len(of_kind), 'task')} is {where}{more} ({join_examples(unique(texts))})"
        findings.append(Finding(severity="failure" if sure else "note", what=what, tasks=tuple(of_kind)))
    return findings

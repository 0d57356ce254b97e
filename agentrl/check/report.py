"""The report of `agentrl check`, as data and as text: cases, proofs with their findings, and properties that were not proven."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from agentrl.base.numbers import all_equal, plural
from agentrl.observe.exclusions import printable_text
from agentrl.records import codec

GOLD, NOTHING, IMAGE = "gold solution", "doing nothing", "image"
Severity = Literal["failure", "warning", "unsafe", "note"]
"""failure: wrong, exit code 1. warning: wrong unless intended. unsafe: correct, but a policy can learn to cheat. note: information."""

SHOWN = 3  # maximum number of examples in a finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding, with all tasks to which it applies."""

    severity: Severity
    what: str
    tasks: tuple[str, ...] = ()  # ids, or split and index of tasks that cannot be created


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A claim, with what was examined to prove it, and the findings."""

    name: str
    looked_at: str
    findings: tuple[Finding, ...] = ()
    unproven: tuple[str, ...] = ()  # what could not be examined
    table: tuple[tuple[str, ...], ...] = ()  # numbers for the report; the first row is the header

    @property
    def ok(self) -> bool:
        """Whether none of the findings is a failure."""
        return all(finding.severity != "failure" for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The result of one case for one task: expected score, actual score (None means unscored), and the reason."""

    task: str
    case: str
    wanted: float
    value: float | None
    detail: str
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether the score equals the expected score, up to rounding; False without a score."""
        return self.value is not None and all_equal((self.value, self.wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The results of `agentrl check` for a family, and the properties that were not proven."""

    cases: tuple[CaseResult, ...]
    proofs: tuple[Proof, ...]
    not_proven: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every case and every proof passed."""
        return all(case.ok for case in self.cases) and all(proof.ok for proof in self.proofs)

    def to_data(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        proofs = [codec.to_data(proof) | {"ok": proof.ok} for proof in self.proofs]
        return {"ok": self.ok, "cases": list(map(codec.to_data, self.cases)), "proofs": proofs, "not_proven": list(self.not_proven)}


def render(report: CheckReport) -> str:
    """Returns the report as text: the proven properties, the problems of each task, and the properties that were not proven."""
    console = Console(width=140, force_terminal=False)
    with console.capture() as captured:
        for line in (*_verdicts(report), ""):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if any(not case.ok for case in report.cases):
            console.print(_wrong_cases(report.cases), markup=False)
        for proof in report.proofs:
            if proof.table:
                console.print(_figures(proof), markup=False)
        findings = [line for proof in report.proofs for line in _findings(proof)]
        for line in (*findings, *([""] if findings else []), "not proven:"):
            console.print(printable_text(line), markup=False, highlight=False, soft_wrap=True)
        for text in report.not_proven:
            console.print(f"  - {printable_text(text)}", markup=False, highlight=False, soft_wrap=True)
    return captured.get().rstrip()


def _findings(proof: Proof) -> list[str]:
    """Returns the lines of a proof's findings, failures first, under a heading with the proof's name; empty if there are no findings."""
    order = ("failure", "warning", "unsafe", "note")
    ordered = sorted(proof.findings, key=lambda finding: order.index(finding.severity))
    lines = [f"  {'FAIL' if finding.severity == 'failure' else finding.severity}: {finding.what}" for finding in ordered]
    return [f"{proof.name}:", *lines] if lines else []


def _verdicts(report: CheckReport) -> list[str]:
    """Returns one line for each claim."""
    cheating = [case for case in report.cases if case.case not in (GOLD, IMAGE)]
    tasks = len({case.task for case in report.cases})
    cheated = sum(case.case != NOTHING for case in cheating)
    lines = [(proof.ok, proof.name, proof.looked_at) for proof in report.proofs]
    if report.cases:
        lines[:0] = [
            (all(case.ok for case in report.cases if case.case in (GOLD, IMAGE)), "every gold solution scores 1", plural(tasks, "task")),
            (all(case.ok for case in cheating), "doing nothing and cheating score 0", f"{cheated:,} cheats on {plural(tasks, 'task')}"),
        ]
    unsafe = {proof.name for proof in report.proofs if any(finding.severity == "unsafe" for finding in proof.findings)}
    marks = ["FAIL" if not ok else "UNSAFE" if name in unsafe else "ok" for ok, name, _ in lines]
    return [f"{mark:<4}  {name:<52} {printable_text(looked_at)}" for mark, (_, name, looked_at) in zip(marks, lines, strict=True)]


def _figures(proof: Proof) -> Table:
    header, *rows = proof.table
    table = Table(header[0], *header[1:], title=proof.name)
    for row in rows:
        table.add_row(*map(printable_text, row))
    return table


def _wrong_cases(cases: Sequence[CaseResult]) -> Table:
    """Returns a table with one row for each cause. Cases without a score share a row if their messages agree. Cases with a wrong score
    share a row if their expected scores agree.
    """
    wrong = [case for case in cases if not case.ok]
    title = f"{len({case.task for case in wrong})} of {len({case.task for case in cases})} tasks are wrong"
    table = Table("tasks", "cases", "expected", "scored", "why", title=title)
    causes: dict[tuple[float, str | None], list[CaseResult]] = {}
    for case in wrong:
        causes.setdefault((case.wanted, _cause(case) if case.value is None else None), []).append(case)
    for (due, _), of_cause in sorted(causes.items(), key=lambda item: -len(item[1])):
        values = [case.value for case in of_cause if case.value is not None]
        scored = "-" if not values else f"{min(values):g}" if min(values) == max(values) else f"{min(values):g} to {max(values):g}"
        kinds = [f"{name} ({times})" if times > 1 else name for name, times in Counter(case.case for case in of_cause).most_common()]
        whys = list({_cause(case): case.detail for case in reversed(of_cause)}.values())[::-1]
        row = (join_examples(unique(case.task for case in of_cause)), join_examples(kinds), f"{due:g}", scored, join_examples(whys))
        table.add_row(*map(printable_text, row))
    return table


def _cause(case: CaseResult) -> str:
    """Returns the message of a case without the task's name and numbers, which differ between tasks."""
    return re.sub(r"\d[\d.,]*", "#", case.detail.replace(case.task, "*"))


def join_examples(texts: Sequence[str]) -> str:
    """Joins the first `SHOWN` strings, and appends the number of omitted strings if there are any."""
    more = f", and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def shorten(text: str, limit: int = 60) -> str:
    """Returns the text on one line, shortened to `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def shorten_difference(first: str, second: str) -> tuple[str, str]:
    """Returns an excerpt on one line of each of two different texts. Both start at most 20 characters before the first difference."""
    equal = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    start = max(0, equal - 20)
    ellipsis = "..." if start else ""
    return shorten(ellipsis + first[start:]), shorten(ellipsis + second[start:])


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the strings without duplicates, in order."""
    return tuple(dict.fromkeys(texts))

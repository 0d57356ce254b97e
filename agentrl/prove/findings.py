"""What a proof found out, and about what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["failure", "warning", "note"]
"""failure: wrong, exit code 1. warning: wrong unless it is meant so. note: good to know."""

SHOWN = 3  # examples in one finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing worth telling, over all the tasks that it holds for."""

    severity: Severity
    what: str
    tasks: tuple[str, ...] = ()  # ids, or split and index where a task cannot even be made


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was to be shown, what was looked at for it, and what was found."""

    name: str
    looked_at: str
    findings: tuple[Finding, ...] = ()
    unproven: tuple[str, ...] = ()  # what it could not look at

    @property
    def ok(self) -> bool:
        return all(finding.severity != "failure" for finding in self.findings)


def plural(count: int, noun: str) -> str:
    """`3 tasks`, `1 task`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def examples(texts: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f", and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def clipped(text: str, limit: int = 60) -> str:
    """One line of text, short enough for a sentence."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """In order, each once."""
    return tuple(dict.fromkeys(texts))

"""Proofs and their findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["failure", "warning", "unsafe", "note"]
"""failure: wrong, exit code 1. warning: wrong unless intended. unsafe: correct, but a policy can learn to cheat.
note: good to know."""

SHOWN = 3  # examples in one finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding, about all the tasks that it applies to."""

    severity: Severity
    what: str
    tasks: tuple[str, ...] = ()  # ids, or split and index of tasks that cannot be made


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A claim, what was looked at to prove it, and the findings."""

    name: str
    looked_at: str
    findings: tuple[Finding, ...] = ()
    unproven: tuple[str, ...] = ()  # what could not be looked at
    table: tuple[tuple[str, ...], ...] = ()  # figures that the report shows, the header first

    @property
    def ok(self) -> bool:
        return all(finding.severity != "failure" for finding in self.findings)


def plural(count: int, noun: str) -> str:
    """`3 tasks`, `1 task`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def join_examples(texts: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f", and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def shorten(text: str, limit: int = 60) -> str:
    """Text in one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Without duplicates, in order."""
    return tuple(dict.fromkeys(texts))

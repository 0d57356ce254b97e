"""A failure of an episode, and who is to blame for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentrl.records.fields import Record, Text


class Blame(StrEnum):
    """Who caused a failure. Only `POLICY` failures are scored."""

    POLICY = "policy"
    TASK = "task"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Record):
    """Something that went wrong, with the blame decided once, at the boundary where it was seen."""

    stage: str  # sandbox | generate | tool | verify | ...
    blame: Blame
    kind: str  # short machine-readable name, such as "exec_timeout"
    message: Text
    turn: int | None = None  # how many turns the episode had by then
    retryable: bool = False

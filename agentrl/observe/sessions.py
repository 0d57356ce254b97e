"""The starts of a run: when each driver started and how it ended. `sessions.jsonl` has one line for each start and one for each end.

A driver that was killed leaves no line for its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.base.files import append_lines, complete_lines, json_line, read_json_lines
from agentrl.base.user_code import printable

FILE = "sessions.jsonl"
_MAX_WHY = 2000  # characters
Ended = Literal["finished", "interrupted", "failed", "killed"]


class Session(BaseModel):
    """One start of a run, the first or a `--resume`."""

    model_config = ConfigDict(frozen=True)

    began: str
    """Start time in UTC."""
    step: int = Field(ge=0)
    """Learner steps done at the start."""
    ended: Ended = "killed"
    """`interrupted`: by the user; `failed`: by a fault; `killed`: no end was recorded. The newest session may still be running."""
    why: str = ""
    """The reason if the session failed."""
    attempts_failed: int = Field(0, ge=0)
    """Attempts since the last recorded step that ended in a fault that the policy did not cause."""


def record_start(folder: Path) -> None:
    """Records the start of a driver and the number of learner steps done."""
    steps = {line["step"] for line in read_json_lines(folder / "metrics.jsonl")}
    append_lines(folder / FILE, [json_line({"began": datetime.now(UTC).isoformat(timespec="seconds"), "step": len(steps)})])


def record_end(folder: Path, how: Ended, *, why: str = "", figures: Mapping[str, float] = MappingProxyType({})) -> None:
    """Records how the driver ended, once. `figures` come from `agentrl.failure.faults.FaultRate`, since the last step."""
    if not any(b'"began"' in line for line in complete_lines(folder / FILE)[-1:]):
        return
    failed = int(figures.get("attempts_failed", 0))
    append_lines(folder / FILE, [json_line({"ended": how, "why": printable(why, _MAX_WHY), "attempts_failed": failed})])


def read_sessions(folder: Path) -> tuple[Session, ...]:
    """The starts of a run, the oldest first; empty if the file is missing. Invalid lines are ignored."""
    sessions: list[Session] = []
    for text in complete_lines(folder / FILE):
        try:
            line = json.loads(text)
            if "began" in line:
                sessions.append(Session.model_validate(line))
            elif sessions:
                sessions[-1] = Session.model_validate(sessions[-1].model_dump() | line)
        except (ValueError, TypeError, RecursionError, ValidationError):
            continue
    return tuple(sessions)

"""The outcome of a run in small files, for users and programs: `summary.json`, and `sessions.jsonl` with the starts of the run.

`sessions.jsonl` has one line for each start of a driver and one for each end. If a driver was killed, there is no line for its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from agentrl.base.files import append_lines, complete_lines, json_line, read_json_lines, write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.base.user_code import printable
from agentrl.errors import StoreError
from agentrl.observe.stats import Rate

SUMMARY_FILE, SESSIONS_FILE = "summary.json", "sessions.jsonl"
_MAX_BYTES, _MAX_SESSIONS = 4 << 20, 16 << 20
_MAX_WHY = 2000  # maximum characters of a reason
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


class Summary(BaseModel):
    """The content of `summary.json`. A figure that the run did not reach is null, never 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """The recipe's name."""
    finished: bool
    """All steps and the evaluation after them were done; see `problems` for whether they gave a result."""
    problems: tuple[str, ...] = ()
    """Why there is no result: no episode was scored, nothing was learned, an evaluation has no score, or a fault ended the run early.
    The exit code is 1 if there are any."""
    interrupted: bool = False
    """A person or a fault ended the run early; `--resume` continues it."""
    sessions: tuple[Session, ...] = ()
    """The starts of the run, the first and every `--resume`, and how each ended."""
    heldout_before: Rate | None = None
    """Mean score on held-out tasks, version 0."""
    heldout_after: Rate | None = None
    """The same after the last step."""
    heldout_real_before: Rate | None = None
    """Mean score on held-out tasks over real data, version 0."""
    heldout_real_after: Rate | None = None
    """The same after the last step."""
    steps: int = Field(ge=0)
    """Learner steps done."""
    episodes: int = Field(ge=0)
    """Stored training episodes, including those of an unfinished step."""
    episodes_left_out: int = Field(ge=0)
    """Training episodes excluded from the loss: a task or infrastructure failure, or no score."""
    attempts_failed: int = Field(0, ge=0)
    """Attempts that ended in a fault that the policy did not cause, including attempts that were retried."""
    left_out_reasons: dict[str, int] = {}
    """Reason -> excluded episodes, the most frequent first; names of episodes and sandboxes are `*`."""
    attempts_cancelled: int = Field(0, ge=0)
    """Spare attempts that were cancelled because their group had enough; they are not counted as episodes."""
    attempts_not_begun: int = Field(0, ge=0)
    """Spare attempts that were not started because their group had enough."""
    groups_stopped: int = Field(0, ge=0)
    """Groups that ended early because their first attempts had equal scores."""
    failures: dict[str, int] = {}
    """Tag -> failed episodes of training and evaluations, the most frequent first; `agentrl failures` shows them."""
    tasks_quarantined: int = Field(0, ge=0)
    """Broken tasks that were quarantined; `quarantine.jsonl` lists them."""
    tasks_withheld: int = Field(0, ge=0)
    """Training tasks withheld because a suite has them or near duplicates; `withheld.jsonl` lists them."""
    judges: dict[str, float] = {}
    """Usage and cost of the run's judges, except those with an external ledger: the fields of `agentrl.judge.ledger.JudgeUsage`, such as
    `calls`, `prompt_tokens` and `money`. Empty without judges."""
    tokens_trained: int = Field(ge=0)
    """Sampled tokens that entered the loss."""
    tokens: dict[str, int] = {}
    """The ledger's counts: `sampled` tokens of stored groups are `trained`, `excluded` or `open`, that is, not used by a step yet."""
    delivered_share: float | None = Field(None, ge=0)
    """Tokens that the learner received per sampled token, counted at both ends; 1 in a correct run."""
    updates_left_out: int = Field(0, ge=0)
    """Optimizer steps that were skipped: a value was not finite, or beyond a limit."""
    groups_left_out: int = Field(0, ge=0)
    """Groups not trained on because a score, logprob or advantage was not finite."""
    rollbacks: int = Field(0, ge=0)
    """Times the weights were reset to an earlier version."""
    weight_swaps: int = Field(ge=0)
    """Versions loaded into the running server."""
    swap_stall_ms_p50: float | None = None
    """Median time for which a swap delayed requests."""
    swap_probe_max_abs_diff: float | None = None
    """Largest logprob difference between server and learner over all swaps, in nats."""
    wall_s: dict[str, float] = {}
    """Seconds by stage, in order of their start; `prepare` starts with the command. Resumed runs add up."""
    sandbox_backend: str
    seed: int
    versions: dict[str, str] = {}
    """Package -> version."""
    by_kind: dict[str, dict[str, Rate]] = {}
    """Phase ("before", "after") -> kind of task -> rate."""

    def write(self, run_dir: Path) -> Path:
        """Replaces `summary.json` in the run folder atomically."""
        path = run_dir / SUMMARY_FILE
        write_atomically(path, self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """Reads `summary.json`. Raises `FileNotFoundError` if it is missing, `StoreError` if it does not validate."""
        path = run_dir / SUMMARY_FILE
        try:
            return cls.model_validate_json(read_bytes(path, most=_MAX_BYTES, inside=run_dir))
        except ValueError as error:
            raise StoreError(f"{path} is not a run summary: {error}") from error


def record_start(folder: Path) -> None:
    """Records the start of a driver and the number of learner steps done."""
    steps = {line["step"] for line in read_json_lines(folder / "metrics.jsonl")}
    append_lines(folder / SESSIONS_FILE, [json_line({"began": datetime.now(UTC).isoformat(timespec="seconds"), "step": len(steps)})])


def record_end(folder: Path, how: Ended, *, why: str = "", figures: Mapping[str, float] = MappingProxyType({})) -> None:
    """Records how the driver ended, once. `figures` come from `agentrl.failure.FaultRate`, since the last step."""
    if not any(b'"began"' in line for line in complete_lines(folder / SESSIONS_FILE)[-1:]):
        return
    failed = int(figures.get("attempts_failed", 0))
    append_lines(folder / SESSIONS_FILE, [json_line({"ended": how, "why": printable(why, _MAX_WHY), "attempts_failed": failed})])


def read_sessions(folder: Path) -> tuple[Session, ...]:
    """Returns the starts of a run, the oldest first; empty if the file is missing. Invalid lines are ignored.

    Raises `OSError`. Raises `ValueError` if the file is not a regular file in its folder or is too large.
    """
    sessions: list[Session] = []
    try:
        lines = read_bytes(folder / SESSIONS_FILE, most=_MAX_SESSIONS, inside=folder).split(b"\n")[:-1]
    except FileNotFoundError:
        return ()
    for text in lines:
        try:
            line = json.loads(text)
            if "began" in line:
                sessions.append(Session.model_validate(line))
            elif sessions:
                sessions[-1] = Session.model_validate(sessions[-1].model_dump() | line)
        except (ValueError, TypeError, RecursionError):
            continue
    return tuple(sessions)

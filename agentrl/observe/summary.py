"""Stores the outcome of a run in small files for users and programs: `summary.json`, and `sessions.jsonl` with the run's sessions.

`sessions.jsonl` has one line for each start of a driver and one for each exit. If a driver was killed, there is no line for its exit.
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
_MAX_WHY = 2000  # maximum number of characters in a reason
Ended = Literal["finished", "interrupted", "failed", "killed"]


class Session(BaseModel):
    """One session of a run: the first session, or a session that was started with `--resume`."""

    model_config = ConfigDict(frozen=True)

    began: str
    """Start time in UTC."""
    step: int = Field(ge=0)
    """Number of learner steps done before the session."""
    ended: Ended = "killed"
    """How the session ended. `interrupted`: the user stopped it. `failed`: a fault stopped it. `killed`: no end was recorded, so if this is
    the newest session, it may still be running."""
    why: str = ""
    """The reason if the session failed."""
    attempts_failed: int = Field(0, ge=0)
    """Number of attempts after the last recorded step that ended in a fault not caused by the policy."""


class Summary(BaseModel):
    """The content of `summary.json`. A figure that the run did not produce is null, never 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """The recipe's name."""
    finished: bool
    """Whether all steps and the evaluation after them are done. `problems` shows whether they produced a result."""
    problems: tuple[str, ...] = ()
    """Reasons why there is no result: no episode was scored, nothing was learned, an evaluation has no score, or a fault stopped the run
    early. The exit code is 1 if there are any reasons."""
    interrupted: bool = False
    """Whether a user or a fault stopped the run early. `--resume` continues it."""
    sessions: tuple[Session, ...] = ()
    """The sessions of the run: the first, and one for every `--resume`."""
    heldout_before: Rate | None = None
    """Mean score of version 0 on held-out tasks."""
    heldout_after: Rate | None = None
    """The same after the last step."""
    heldout_real_before: Rate | None = None
    """Mean score of version 0 on held-out tasks over real data."""
    heldout_real_after: Rate | None = None
    """The same after the last step."""
    steps: int = Field(ge=0)
    """Number of learner steps done."""
    episodes: int = Field(ge=0)
    """Number of stored training episodes, including those of an unfinished step."""
    episodes_left_out: int = Field(ge=0)
    """Number of training episodes excluded from the loss because of a task or infrastructure failure or a missing score."""
    attempts_failed: int = Field(0, ge=0)
    """Number of attempts that ended in a fault not caused by the policy, including attempts that were retried."""
    left_out_reasons: dict[str, int] = {}
    """Reason -> number of excluded episodes, the most frequent first. Names of episodes and sandboxes are replaced with `*`."""
    attempts_cancelled: int = Field(0, ge=0)
    """Number of spare attempts cancelled because their group already had enough attempts. They are not counted as episodes."""
    attempts_not_begun: int = Field(0, ge=0)
    """Number of spare attempts not started because their group already had enough attempts."""
    groups_stopped: int = Field(0, ge=0)
    """Number of groups that were stopped early because their first attempts had equal scores."""
    failures: dict[str, int] = {}
    """Tag -> number of failed episodes in training and evaluations, the most frequent first. `agentrl failures` shows the episodes."""
    tasks_quarantined: int = Field(0, ge=0)
    """Number of broken tasks that were quarantined. `quarantine.jsonl` lists them."""
    tasks_withheld: int = Field(0, ge=0)
    """Number of training tasks withheld because a suite contains them or near duplicates of them. `withheld.jsonl` lists them."""
    judges: dict[str, float] = {}
    """Usage and cost of the run's judges, except those with an external ledger: the fields of `agentrl.judge.ledger.JudgeUsage`, such as
    `calls`, `prompt_tokens` and `money`. Empty if there are no such judges."""
    tokens_trained: int = Field(ge=0)
    """Number of sampled tokens that entered the loss."""
    tokens: dict[str, int] = {}
    """The ledger's token counts. The `sampled` tokens of stored groups are `trained`, `excluded` or `open` (not used by a step yet)."""
    delivered_share: float | None = Field(None, ge=0)
    """Number of tokens that the learner received, divided by the number of tokens that were sampled; 1 in a correct run."""
    updates_left_out: int = Field(0, ge=0)
    """Number of optimizer steps skipped because a value was not finite or violated a limit."""
    groups_left_out: int = Field(0, ge=0)
    """Number of groups not trained on because a score, logprob or advantage was not finite."""
    rollbacks: int = Field(0, ge=0)
    """Number of times that the weights were reset to an earlier version."""
    weight_swaps: int = Field(ge=0)
    """Number of versions loaded into the running server."""
    swap_stall_ms_p50: float | None = None
    """Median time for which a swap delayed requests, in milliseconds."""
    swap_probe_max_abs_diff: float | None = None
    """Largest absolute logprob difference between the server and the learner in all swaps, in nats."""
    wall_s: dict[str, float] = {}
    """Stage -> seconds, in the order in which the stages started. `prepare` starts with the command. The sessions of a resumed run are
    added up."""
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
        """Reads `summary.json`. Raises `OSError` (`FileNotFoundError` if it is missing) if the file cannot be opened, and `StoreError`
        if its content is invalid."""
        path = run_dir / SUMMARY_FILE
        try:
            return cls.model_validate_json(read_bytes(path, most=_MAX_BYTES, inside=run_dir))
        except ValueError as error:
            raise StoreError(f"{path} is not a run summary: {error}") from error


def record_start(folder: Path) -> None:
    """Records the start of a driver, and the number of learner steps that are already done. Raises `StoreError` if a line of
    `metrics.jsonl` is damaged."""
    steps = {line["step"] for line in read_json_lines(folder / "metrics.jsonl", "step")}
    append_lines(folder / SESSIONS_FILE, [json_line({"began": datetime.now(UTC).isoformat(timespec="seconds"), "step": len(steps)})])


def record_end(folder: Path, how: Ended, *, why: str = "", figures: Mapping[str, float] = MappingProxyType({})) -> None:
    """Records how the driver exited, unless its exit is already recorded.

    `figures` are the metrics from `agentrl.failure.FaultRate` for the time since the last step.
    """
    if not any(b'"began"' in line for line in complete_lines(folder / SESSIONS_FILE)[-1:]):
        return
    failed = int(figures.get("attempts_failed", 0))
    append_lines(folder / SESSIONS_FILE, [json_line({"ended": how, "why": printable(why, _MAX_WHY), "attempts_failed": failed})])


def read_sessions(folder: Path) -> tuple[Session, ...]:
    """Returns the sessions of a run, the oldest first; empty if the file is missing. Invalid lines are ignored.

    Raises `OSError` if the file cannot be read, and `ValueError` if it is not a regular file in the run folder or is too large.
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

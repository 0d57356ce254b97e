"""A failure of an episode, and the party that is to blame for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentrl.records.fields import Record, Text

WORKER_LOST = "worker_lost"
"""`Failure.kind` of an attempt whose rollout worker was lost, and (in stage `group`) of a group for which several workers were lost."""
NO_ACTION = "no_action"
"""`Failure.kind` of an episode in an environment that ended because the agent's turn contained no action."""
NEIGHBOR_CRASH = "NeighborCrash"
"""`Failure.kind` of an attempt whose environment was stopped because another episode's environment crashed their shared process."""
_OTHERS_FAULTS = ("ServerDied", "SlowServer", "slow_server", NEIGHBOR_CRASH)  # faults of a server or another episode


class Blame(StrEnum):
    """Who caused a failure. Only `POLICY` failures are scored."""

    POLICY = "policy"
    TASK = "task"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Record):
    """A fault in an episode. The blame is decided once, at the boundary at which the fault is caught."""

    stage: str  # sandbox | generate | tool | verify | ...
    blame: Blame
    kind: str  # short machine-readable name, such as "exec_timeout"
    message: Text
    turn: int | None = None  # number of turns that the episode had at the time
    retryable: bool = False

    @property
    def policy_reachable(self) -> bool:
        """Whether the policy can have provoked a fault that excludes its episode.

        True if the fault occurred after the policy's first turn or in scoring, and was not caused by a dead or slow server or by another
        episode. Also true if several rollout workers were lost while they sampled the group. Always False if the policy is to blame,
        because the episode is then scored.
        """
        if self.blame is Blame.POLICY or self.kind in _OTHERS_FAULTS:
            return False
        if self.kind == WORKER_LOST:
            return self.stage == "group"
        return self.stage == "score" or (self.turn or 0) > 0

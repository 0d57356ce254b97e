"""A failure of an episode, and the party that is to blame for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentrl.records.fields import Record, Text

WORKER_LOST = "worker_lost"
"""`Failure.kind` of an attempt whose rollout worker was lost, and of a group that has lost several workers (stage `group`)."""
NO_ACTION = "no_action"
"""`Failure.kind` of an episode in an environment, if the agent ended it by a turn without an action."""
NEIGHBOR_CRASH = "NeighborCrash"
"""`Failure.kind` of an attempt whose environment was ended by the environment of another episode."""
_OTHERS_FAULTS = ("ServerDied", "SlowServer", "slow_server", NEIGHBOR_CRASH)  # of a server or another episode, regardless of this one


class Blame(StrEnum):
    """Who caused a failure. Only `POLICY` failures are scored."""

    POLICY = "policy"
    TASK = "task"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Record):
    """A fault of an episode. The blame is decided once, at the boundary where the fault was caught."""

    stage: str  # sandbox | generate | tool | verify | ...
    blame: Blame
    kind: str  # short machine-readable name, such as "exec_timeout"
    message: Text
    turn: int | None = None  # number of turns that the episode had
    retryable: bool = False

    @property
    def policy_reachable(self) -> bool:
        """Whether the policy can have provoked a fault that excludes its episode. This is possible if the fault came after the policy's
        first turn or in scoring, and neither a dead or slow server nor another episode caused it. It is also possible if several rollout
        workers were lost while they sampled its group. Always False if the policy is blamed, because then the episode is scored."""
        if self.blame is Blame.POLICY or self.kind in _OTHERS_FAULTS:
            return False
        if self.kind == WORKER_LOST:
            return self.stage == "group"
        return self.stage == "score" or (self.turn or 0) > 0

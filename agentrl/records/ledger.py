"""The ledger's entry for a stored group: its counts, its learner step, and how the step used it."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.fields import Record, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUse(Record):
    """How a learner step used a group. Sampled tokens of the group that the step did not train count as excluded."""

    tokens_trained: int = 0
    reason: Text = ""  # why the step trained none of the group's tokens; empty if it trained any


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry(Record):
    """A stored group. A group is first ready, then assigned to a learner step, and finally consumed by that step (`trained` or `excluded`).

    A group whose scores are incomplete is parked until the last late part has arrived or expired.
    """

    index: int
    task_id: str
    attempts: int
    counted: int  # number of attempts that have a score and are not excluded from the loss
    has_spread: bool  # whether the scores of the counted attempts differ
    oldest_version: int | None  # oldest policy version that sampled any token; None if no token was sampled
    tokens_sampled: int  # in all attempts, including excluded and cancelled attempts; a turn that several attempts share counts once
    late_parts: int = 0  # number of score parts that were pending when the group was stored
    pending: int = 0  # number of late parts that are still pending
    step: int | None = None  # learner step to which the group is assigned; None if it is not assigned
    use: GroupUse | None = None  # recorded after the checkpoint of that step; None until then
    has_episodes: bool = True  # False means that the store has deleted the episodes but keeps the entry

    @property
    def is_residual(self) -> bool:
        """Whether the group is a residual, which holds the late parts of another group's scores. The sampled tokens of a residual are
        counted in the entry of the other group."""
        return self.index < 0

    @property
    def state(self) -> str:
        """`parked`, `ready`, `assigned`, `trained` or `excluded`. `excluded` means that the step trained none of the group's tokens."""
        if self.step is None:
            return "parked" if self.pending else "ready"
        if self.use is None:
            return "assigned"
        return "trained" if self.use.tokens_trained else "excluded"

    @property
    def tokens_open(self) -> int:
        """Number of sampled tokens if the group is parked, ready or assigned; 0 if it is consumed."""
        return self.tokens_sampled if self.use is None else 0

    @property
    def tokens_excluded(self) -> int:
        """Number of sampled tokens that the group's step did not train; 0 until the group is consumed."""
        return 0 if self.use is None else self.tokens_sampled - self.use.tokens_trained

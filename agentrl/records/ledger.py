"""The ledger's entry of a stored group: its counts, its learner step, and the use that the step made of it."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.fields import Record, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUse(Record):
    """How a learner step used a group. The group's sampled tokens that the step did not train are excluded."""

    tokens_trained: int = 0
    reason: Text = ""  # why the step trained none of the group's tokens; empty if it trained any


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry(Record):
    """A stored group. The group is ready, then assigned to a learner step, then consumed by that step (`trained` or `excluded`).

    A group whose scores are incomplete is parked until the last late part has arrived or expired.
    """

    index: int
    task_id: str
    attempts: int
    counted: int  # attempts that have a score and are not excluded from the loss
    has_spread: bool  # whether the scores of the counted attempts differ
    oldest_version: int | None  # oldest policy version that sampled any token; None if no token was sampled
    tokens_sampled: int  # in all attempts, including excluded and cancelled attempts; a turn that attempts share counts once
    late_parts: int = 0  # parts of scores that were to come when the group was stored
    pending: int = 0  # late parts that are still to come
    step: int | None = None  # learner step that the group is assigned to; None if it is ready
    use: GroupUse | None = None  # recorded after the checkpoint of that step; None until then
    has_episodes: bool = True  # False: the store has deleted the episodes and keeps the entry

    @property
    def is_residual(self) -> bool:
        """Whether the group has the late parts of another group's scores. The tokens of such a group are counted in that other group."""
        return self.index < 0

    @property
    def state(self) -> str:
        """`parked`, `ready`, `assigned`, `trained` or `excluded`. The step of an `excluded` group trained none of its tokens."""
        if self.step is None:
            return "parked" if self.pending else "ready"
        if self.use is None:
            return "assigned"
        return "trained" if self.use.tokens_trained else "excluded"

    @property
    def tokens_open(self) -> int:
        """Sampled tokens of a group that is parked, ready or assigned; 0 for a consumed group."""
        return self.tokens_sampled if self.use is None else 0

    @property
    def tokens_excluded(self) -> int:
        """Sampled tokens that the group's step did not train; 0 until the group is consumed."""
        return 0 if self.use is None else self.tokens_sampled - self.use.tokens_trained

"""The ledger's record of a group: what the run knows about it without reading its episodes."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.records.fields import Record, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUse(Record):
    """What a learner step did with a group. The group's other sampled tokens are excluded."""

    tokens_trained: int = 0
    reason: Text = ""  # why tokens of counted episodes were not trained; empty if all were

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.tokens_trained < 0:
            raise ValueError(f"GroupUse: {self.tokens_trained} tokens trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry(Record):
    """A stored group: ready, assigned to a learner step, or consumed by it."""

    index: int
    task_id: str
    attempts: int
    counted: int  # attempts with a score that are not excluded
    has_spread: bool  # whether the counted attempts scored differently
    oldest_version: int | None  # oldest policy version that sampled any token; None if no token was sampled
    tokens_sampled: int  # in all attempts, including excluded and cancelled ones; a turn that attempts share counts once
    step: int | None = None  # learner step that the group is assigned to
    use: GroupUse | None = None  # set by the checkpoint of that step

    @property
    def state(self) -> str:
        """`ready`, `assigned`, `trained`, or `excluded` if its step trained none of its tokens."""
        if self.step is None:
            return "ready"
        if self.use is None:
            return "assigned"
        return "trained" if self.use.tokens_trained else "excluded"

    @property
    def tokens_open(self) -> int:
        """Sampled tokens that no completed step has trained or excluded."""
        return self.tokens_sampled if self.use is None else 0

    @property
    def tokens_excluded(self) -> int:
        """Sampled tokens that the group's step did not train."""
        return 0 if self.use is None else self.tokens_sampled - self.use.tokens_trained

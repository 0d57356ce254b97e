"""Protocols for storing scored groups and episodes in progress."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentrl.records import EpisodeState, Group, GroupUse, LateScore, LedgerEntry, PendingScore, ScoredEpisode, ScoreReceipt


class ExperienceStore(Protocol):
    """Durable storage of scored groups, written by the driver and read by the learner. The store is safe for concurrent processes.

    A stored group is ready, or is parked while parts of its scores are pending. A ready group is assigned to a learner step,
    and consumed when the step completes. The driver and every learner rank open the store through its factory, which receives the run
    folder and the recipe. Every method raises `StoreError` if the store is damaged, full or unavailable.
    """

    def put(self, group: Group) -> bool:
        """Stores a group, and its residual if `agentrl.experience.residuals.split_group` returns a residual.

        Returns False and stores nothing if a group with this index already exists.
        """

    def has(self, index: int) -> bool:
        """Returns whether the group with this index is stored."""
        ...

    def entries(self, *, first: int | None = None, step: int | None = None) -> tuple[LedgerEntry, ...]:
        """Returns the ledger entries of the stored groups, in ascending order of index. The episodes of the groups are not read.

        An implementation computes the entry of a new group with `agentrl.experience.new_entry`.

        Args:
            first: smallest index to return; None means all groups. `first` is ignored if `step` is set. Unconsumed groups with late parts,
                including residuals, are returned regardless of their index.
            step: return only the groups of this learner step; None means all groups.
        """

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """Returns the groups in the requested order, with the late parts that have arrived.

        Raises `StoreError` if a group is absent or damaged, or if its episodes were deleted.
        """

    def assign(self, step: int, indices: Sequence[int]) -> None:
        """Assigns groups to a learner step. Raises `StoreError` if a group is absent, parked, consumed, or assigned to an earlier step.

        An interrupted attempt may have assigned groups to this step and to later steps. If the groups of this step differ from `indices`,
        all groups that are assigned to this step and to later steps become ready again.
        """

    def commit(self, step: int, uses: Mapping[int, GroupUse], checkpoint: str) -> None:
        """Marks the groups of a step as consumed. Raises `StoreError` if a group is absent, parked, or belongs to a different step.

        Args:
            uses: group index -> how the step used the group.
            checkpoint: name of the checkpoint that contains the result of the step.
        """

    def reconcile(self, consumed: Mapping[int, Mapping[int, GroupUse]]) -> None:
        """Sets the ledger to the state of the checkpoint from which the learner starts.

        Groups that are assigned to later steps stay assigned, so that a repeated step uses the same groups. All other groups become ready.

        Args:
            consumed: learner step -> group index -> how the step used the group.
        """

    def add_score(self, score: LateScore, *, now: float) -> ScoreReceipt:
        """Stores a late score durably. Any process may call this method, even if the run is not active. Raises `ScoreRejected`.

        `agentrl.experience.late_parts.LatePart.accept` decides whether a score is stored.

        Args:
            now: the current Unix time in seconds.
        """

    def expire_scores(self, *, now: float) -> tuple[int, ...]:
        """Closes the pending parts of every episode that has a part whose expiry is at most `now`.

        These episodes remain unscored. Returns the indices of the groups that contain these episodes.
        """

    def pending_scores(self, *, limit: int, after: str = "") -> tuple[PendingScore, ...]:
        """Returns the pending parts of the first `limit` episodes whose ids follow `after`, in ascending order of id."""

    def parked(self) -> tuple[int, ...]:
        """Returns the indices of the groups that wait for late scores, in ascending order."""

    def start_block(self, block: int, version: int) -> None:
        """Records the policy version from which a block of groups starts. Only the first record for a block is kept."""

    def block_versions(self) -> dict[int, int]:
        """Returns the recorded versions, as a mapping from block to policy version."""

    def close(self) -> None:
        """Closes the store."""


@runtime_checkable
class GroupCommit(Protocol):
    """Optional extension of an `ExperienceStore`: one durable commit for several groups."""

    def put_all(self, groups: Sequence[Group]) -> tuple[bool, ...]:
        """Stores either all of the groups or none of them. Returns the result of `put` for each group."""
        ...


@runtime_checkable
class EvaluationStore(Protocol):
    """Optional extension of an `ExperienceStore`: it also stores evaluation episodes, which belong to no group in the ledger."""

    def put_evaluated(self, phase: str, step: int, group: Group) -> None:
        """Stores the episodes in `group`. The group's index has no meaning.

        Args:
            step: learner step that produced the evaluated version.
        """

    def delete_evaluated(self, phase: str) -> None:
        """Deletes the stored episodes of an evaluation phase."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A group that a transport delivered, the transport's id for the delivery, and the lease under which the group was sampled."""

    id: str
    group: Group
    lease: str = ""


class GroupTransport(Protocol):
    """Carries groups from rollout workers to the driver, each at least once. The experience store keeps one group per index.

    Every method waits while the transport is unavailable or full, and raises `StoreError` if the wait is too long.
    """

    def append(self, groups: Sequence[Group], *, leases: Sequence[str] = ()) -> None:
        """Adds either all of the groups, with their leases, or none of them. The groups are durable when the call returns."""

    def claim(self, *, limit: int = 16, wait_s: float = 1.0) -> tuple[Delivery, ...]:
        """Returns up to `limit` unacknowledged groups; empty if none arrives within `wait_s` seconds. Excludes damaged entries."""
        ...

    def acknowledge(self, ids: Collection[str]) -> None:
        """Removes deliveries whose groups the experience store contains."""

    def close(self) -> None:
        """Closes the connections."""


class EpisodeCheckpoints(Protocol):
    """Saves episodes in progress, so that a crash loses at most one turn of each episode.

    If a state cannot be saved or loaded, the error is logged and the episode does not fail.
    """

    async def save_state(self, group: int, member: int, state: EpisodeState) -> None:
        """Saves the newest state of an attempt and replaces the previous state. `member` is the attempt's index in its group."""

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        """Saves an attempt's scored episode, which replaces the attempt's saved state until the group is stored."""

    async def load(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        """Returns the saved state or scored episode of an attempt; None if neither exists or the saved data is damaged."""

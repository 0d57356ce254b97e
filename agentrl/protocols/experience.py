"""Storage of scored groups and of episodes in progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agentrl.records import EpisodeState, Group, GroupUse, LedgerEntry, ScoredEpisode


class ExperienceStore(Protocol):
    """Durable storage of scored groups, written by the driver and read by the learner. Safe for concurrent processes.

    A group is stored, then assigned to a learner step, then used by it. The driver and every learner rank open the store with its
    factory, which receives the run folder and the recipe. Every method raises `StoreError` if the store is damaged, full or unavailable.
    """

    def put(self, group: Group) -> bool:
        """Stores a group. Returns False if a group with this index exists."""

    def has(self, index: int) -> bool:
        """Whether a group is stored."""
        ...

    def entries(self, *, first: int = 0, step: int | None = None) -> tuple[LedgerEntry, ...]:
        """What is known of the stored groups without reading their episodes, in ascending order of index.

        `agentrl.experience.new_entry` returns the entry of a group that no step has taken yet.

        Args:
            first: smallest index.
            step: only the groups of this learner step; None means all groups.
        """

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """The groups in the requested order. Raises `StoreError` if one is absent or damaged."""

    def assign(self, step: int, indices: Sequence[int]) -> None:
        """Assigns groups to a learner step, which no earlier step has taken. Raises `StoreError` if one is absent or already taken.

        An interrupted attempt may have assigned groups to this step and later ones. If those of this step are not `indices`, all become
        ready again.
        """

    def commit(self, step: int, uses: Mapping[int, GroupUse], checkpoint: str) -> None:
        """Records how a step, whose result is in `checkpoint`, used its groups. Raises `StoreError` if another step has used one."""

    def reconcile(self, consumed: Mapping[int, Mapping[int, GroupUse]]) -> None:
        """Updates the ledger to the checkpoint in use, after a crash: learner step -> group index -> use.

        Groups of later steps stay assigned to them, so that a repeated step takes the same groups. All others become ready.
        """

    def close(self) -> None:
        """Closes the store."""


class EpisodeCheckpoints(Protocol):
    """Saves episodes in progress, so that a crash costs at most one turn of each.

    A state that cannot be saved or loaded is logged and never fails the episode.
    """

    async def save_state(self, group: int, member: int, state: EpisodeState) -> None:
        """Saves the newest state of one member of a group and replaces the previous one."""

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        """Saves the outcome of a member in place of its state, until the group is stored."""

    async def load(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        """The saved state or outcome of a member; None if there is none or it is damaged."""

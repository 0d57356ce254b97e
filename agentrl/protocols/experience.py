"""Storage of scored groups and of episodes in progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agentrl.records import EpisodeState, Group, ScoredEpisode


class ExperienceStore(Protocol):
    """Durable storage of scored groups, written by the driver and read by the learner. Safe for concurrent processes.

    The driver and every learner rank open it with its factory, which receives the run folder and the recipe. Every method raises
    `StoreError` if the store is damaged, full or unavailable.
    """

    def put(self, group: Group) -> bool:
        """Stores a group. Returns False if a group with this index exists."""

    def has(self, index: int) -> bool:
        """Whether a group is stored."""
        ...

    def take(self, step: int, indices: Sequence[int], *, timeout_s: float) -> tuple[Group, ...]:
        """Waits for the groups and returns them in order, without consuming them. Raises `TimeoutError`."""

    def commit(self, step: int, indices: Sequence[int], checkpoint: str) -> None:
        """Marks groups as consumed by `step`, whose result is in `checkpoint`. Raises `StoreError` if one was consumed before."""

    def reconcile(self, consumed: Mapping[int, Sequence[int]]) -> None:
        """Updates the store to the checkpoint in use, after a crash. `consumed` maps steps to the groups that they consumed."""

    def indices(self) -> tuple[int, ...]:
        """The indices of all stored groups, in ascending order."""

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """The groups in the requested order. Raises `StoreError` if one is absent or damaged."""

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

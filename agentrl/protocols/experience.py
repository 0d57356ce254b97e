"""Storage of scored groups and of episodes in progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agentrl.records import EpisodeState, Group, ScoredEpisode


class ExperienceStore(Protocol):
    """Durable scored groups between rollout and learner processes. Safe to use from several processes at once.

    The driver and every rank of the learner open it with its factory, which gets the run folder and the recipe, and they meet in it
    alone. Every method raises `StoreError` when the store is damaged, full or unavailable.
    """

    def put(self, group: Group) -> bool:
        """Stores a group durably; False when a group of this index is already there (delivered twice)."""

    def has(self, index: int) -> bool: ...

    def take(self, step: int, indices: Sequence[int], *, timeout_s: float) -> tuple[Group, ...]:
        """Waits until all the groups exist and returns them in order; raises `TimeoutError`. Taking is not consuming."""

    def commit(self, step: int, indices: Sequence[int], checkpoint: str) -> None:
        """Marks the groups consumed by `step`, whose effect is durable in `checkpoint`. Raises `StoreError` if one was consumed before."""

    def reconcile(self, consumed: Mapping[int, Sequence[int]]) -> None:
        """After a crash: makes the store agree with the checkpoint in use (step -> group indices consumed by it)."""

    def indices(self) -> tuple[int, ...]:
        """Of all groups that are stored, in ascending order."""

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """The groups in the order asked for, equal to those that were put; `StoreError` when one is absent or damaged."""

    def close(self) -> None: ...


class EpisodeCheckpoints(Protocol):
    """Keeps what running groups have so far, so that a crash costs an episode no more than the turn it was in.

    It is a safety net: what cannot be kept or found is logged, and never fails the episode.
    """

    async def save_state(self, group: int, member: int, state: EpisodeState) -> None:
        """Keeps the newest state of one member of a group, in place of the one before."""

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        """Keeps a member's outcome in place of its state, until its group is stored."""

    async def load(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        """What is kept of a member; None when there is nothing, or nothing intact."""

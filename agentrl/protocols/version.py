"""The registry of policy versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentrl.records import PolicyVersion, VersionState


class VersionRegistry(Protocol):
    """The policy versions of a run, shared between processes through the run folder."""

    def add(self, version: PolicyVersion) -> None:
        """Registers a version. Raises `StoreError` if its number is already registered with different weights."""

    def get(self, number: int) -> PolicyVersion | None:
        """Returns a version; None if it is not registered."""

    def latest(self, *states: VersionState) -> PolicyVersion | None:
        """Returns the highest-numbered version in one of `states`, or in any state if none is given; None if there is no such version."""

    def set_state(self, number: int, state: VersionState, *, sha256: str | None = None) -> None:
        """Sets the state of a version. Raises `StoreError` if `sha256` is given and is not the hash of the version's weights."""

    def set_evals(self, number: int, evals: Mapping[str, float]) -> None:
        """Records evaluation results for a version."""

    def verify(self, version: PolicyVersion) -> None:
        """Raises `StoreError` if the stored weights differ from the registered weights."""

    def reconcile(self, newest: int) -> tuple[int, ...]:
        """Removes the versions that are newer than the learner's checkpoint (`newest`), and returns their numbers. Called after a crash."""

    def hold(self, number: int) -> None:
        """Protects the weights of this version from `prune` in all processes until a different version is held."""

    def pinned(self) -> frozenset[int]:
        """Returns the versions whose weights and checkpoints are kept until they are unpinned."""

    def prune(self, keep: int) -> tuple[int, ...]:
        """Deletes the weights of old versions, except versions still in use and the `keep` newest. Returns the numbers of the versions
        whose weights were deleted."""

    def close(self) -> None:
        """Closes the registry."""

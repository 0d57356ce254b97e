"""The registry of policy versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentrl.records import PolicyVersion, VersionState


class VersionRegistry(Protocol):
    """The policy versions of a run, shared between processes through the run folder."""

    def add(self, version: PolicyVersion) -> None: ...

    def get(self, number: int) -> PolicyVersion | None: ...

    def latest(self, *states: VersionState) -> PolicyVersion | None:
        """Highest-numbered version in one of `states` (any state when none is given)."""

    def set_state(self, number: int, state: VersionState, *, sha256: str | None = None) -> None:
        """Raises `StoreError` where the version's weights are not those of `sha256`."""

    def set_evals(self, number: int, evals: Mapping[str, float]) -> None: ...

    def verify(self, version: PolicyVersion) -> None:
        """Raises `StoreError` unless the weights that are kept are those that were registered."""

    def reconcile(self, newest: int) -> tuple[int, ...]:
        """After a crash: forgets every version newer than the learner's checkpoint, weights included; returns their numbers."""

    def hold(self, number: int) -> None:
        """Has `prune`, in any process, keep the weights of this version, until another one is held."""

    def prune(self, keep: int) -> tuple[int, ...]:
        """Deletes the weights of old versions, all but those still needed and the `keep` newest; returns their numbers."""

    def close(self) -> None: ...

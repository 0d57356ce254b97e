"""A learner's access to its run: how it reads and writes the ledger, the registry, checkpoints, versions and records.

`FolderAccess` uses the run folder. `agentrl.learner.remote_access.RemoteAccess` is for a learner whose host does not share the driver's
disk; it uses a mirror of the run folder and calls the driver. A step is complete once `checkpoint_written` has returned, because the next
learner then finds its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentrl.errors import StoreError
from agentrl.experience import step_uses
from agentrl.experience.step_uses import StepUses
from agentrl.learner.driver_reports import UpdateFailureLog, disk_errors_raised
from agentrl.learner.update_guard import UpdateFailure
from agentrl.protocols import VersionRegistry
from agentrl.records import Group, GroupUse, LedgerEntry, PolicyVersion, VersionState
from agentrl.serving.access import ServerAddress, announced_server
from agentrl.version import rollback
from agentrl.version.rollback import RollbackRequest

Spare = Callable[[], Collection[int]]
"""Returns the numbers of the checkpoints that, at the time of the call, must not be deleted."""


class Collective(Protocol):
    """The members of `agentrl.learner.ranks.Ranks` that a `LearnerAccess` uses. Unlike `Ranks`, this class does not need torch."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""

    @property
    def is_first_on_host(self) -> bool:
        """Whether this is the first rank on its host."""

    @property
    def hosts(self) -> int:
        """The number of hosts."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the `data` of all ranks, in rank order. Every rank receives the same list."""
        ...

    def barrier(self) -> None:
        """Waits until all ranks have called this method."""


class LearnerStore(Protocol):
    """The methods of an `ExperienceStore` that a learner calls."""

    def entries(self, *, first: int | None = None, step: int | None = None) -> tuple[LedgerEntry, ...]:
        """See `ExperienceStore.entries`."""
        ...

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """See `ExperienceStore.groups`."""
        ...

    def assign(self, step: int, indices: Sequence[int]) -> None:
        """See `ExperienceStore.assign`."""

    def commit(self, step: int, uses: Mapping[int, GroupUse], checkpoint: str) -> None:
        """See `ExperienceStore.commit`."""

    def close(self) -> None:
        """See `ExperienceStore.close`."""


class ReconciledStore(LearnerStore, Protocol):
    """The store methods that `FolderAccess` calls."""

    def reconcile(self, consumed: Mapping[int, Mapping[int, GroupUse]]) -> None:
        """See `ExperienceStore.reconcile`."""


class LearnerRegistry(Protocol):
    """The methods of a `VersionRegistry` that a learner calls."""

    def add(self, version: PolicyVersion) -> None:
        """See `VersionRegistry.add`."""

    def get(self, number: int) -> PolicyVersion | None:
        """See `VersionRegistry.get`."""

    def latest(self, *states: VersionState) -> PolicyVersion | None:
        """See `VersionRegistry.latest`."""

    def set_state(self, number: int, state: VersionState) -> None:
        """See `VersionRegistry.set_state`."""

    def verify(self, version: PolicyVersion) -> None:
        """See `VersionRegistry.verify`."""

    def reconcile(self, newest: int) -> tuple[int, ...]:
        """See `VersionRegistry.reconcile`."""
        ...

    def pinned(self) -> frozenset[int]:
        """See `VersionRegistry.pinned`."""
        ...

    def prune(self, keep: int) -> tuple[int, ...]:
        """See `VersionRegistry.prune`."""
        ...

    def close(self) -> None:
        """See `VersionRegistry.close`."""


class LearnerAccess(Protocol):
    """The parts of a run that a learner reads and writes. Every rank has a `LearnerAccess`, but unless a method says otherwise, only rank 0
    writes."""

    @property
    def folder(self) -> Path:
        """The run folder, or its mirror on this host."""

    @property
    def store(self) -> LearnerStore:
        """The ledger."""

    @property
    def registry(self) -> LearnerRegistry:
        """The registry of versions."""

    @property
    def poll_s(self) -> float:
        """Seconds between two checks of the ledger."""

    def prepare(self, alert: Callable[[str], None], ranks: Collective) -> None:
        """Makes the newest intact checkpoint available in `folder`. Calls `alert` if a newer one is damaged. Must be called on all
        ranks."""

    def need_checkpoint(self, number: int, ranks: Collective) -> None:
        """Makes checkpoint `number` available in `folder` if the run has it. Must be called on all ranks."""

    @property
    def own_disk(self) -> bool:
        """Whether each host of the learner has its own `folder`."""

    def checkpoint_written(self, folder: Path, spare: Spare, ranks: Collective) -> None:
        """Returns once the complete checkpoint in `folder` is durably available to the next learner. If the ranks run on several hosts
        with their own disks, `folder` contains this host's files, and all ranks call this method; otherwise only rank 0 calls it."""

    def prune_checkpoints(self, keep: int, spare: Spare) -> None:
        """Deletes checkpoints that the next learner would find, except the newest `keep` and those that `spare` returns."""

    def version_written(self, folder: Path) -> None:
        """Returns once the servers can fetch the complete version in `folder`."""

    def base_probe_written(self) -> None:
        """Returns once the driver has the probe of version 0."""

    def tokens_recorded(self, step: int, rank: int) -> None:
        """Makes the tokens that a rank recorded in a step available to readers of the run (`agentrl.experience.token_records`).

        Does nothing if the rank recorded no tokens. An error is logged and does not stop the run. Each rank that records tokens
        calls this method after the version has been published.
        """

    def record_uses(self, uses: StepUses) -> None:
        """Durably records how the step after the last recorded one used its groups. The checkpoint of that step is written afterwards."""

    def reconcile(self, steps: int, sha256: str) -> None:
        """Restores the ledger and the recorded uses to those of the checkpoint after `steps` steps.

        Raises `StoreError` if the ledger or the recorded uses do not belong to that checkpoint.

        Args:
            sha256: hash of what the steps consumed (`agentrl.experience.step_uses`).
        """

    def record_setbacks(self, setbacks: tuple[UpdateFailure, ...]) -> None:
        """Appends setbacks to the run's setback log."""

    def forget_setbacks(self, step: int) -> None:
        """Removes the setbacks of `step` and of all later steps."""

    def pending_rollback(self) -> RollbackRequest | None:
        """Returns the rollback that the gate or a user requested, or None if there is no request."""

    def find_server(self) -> ServerAddress | None:
        """Returns the server to which weights are sent over NCCL, or None if no server is running."""

    def close(self) -> None:
        """Closes the store and the registry."""


class FolderAccess:
    """A `LearnerAccess` that uses the run folder, on a disk that the learner shares with the driver."""

    poll_s, own_disk = 0.05, False

    def __init__(self, folder: Path, store: ReconciledStore, registry: VersionRegistry) -> None:
        self.folder, self.store, self.registry = folder, store, registry
        self.checkpoints = folder / "checkpoints"
        self._setbacks = UpdateFailureLog(folder)

    def prepare(self, alert: Callable[[str], None], ranks: Collective) -> None:
        """Does nothing, because all checkpoints are in the run folder."""

    def need_checkpoint(self, number: int, ranks: Collective) -> None:
        """Does nothing."""

    def checkpoint_written(self, folder: Path, spare: Spare, ranks: Collective) -> None:
        """Does nothing."""

    def prune_checkpoints(self, keep: int, spare: Spare) -> None:
        """Does nothing, because `agentrl.learner.checkpoint.save` has already deleted the old ones."""

    def version_written(self, folder: Path) -> None:
        """Does nothing."""

    def base_probe_written(self) -> None:
        """Does nothing."""

    def tokens_recorded(self, step: int, rank: int) -> None:
        """Does nothing."""

    def record_uses(self, uses: StepUses) -> None:
        """Appends a line to `checkpoints/consumed.jsonl`. Raises `DiskFull` or `LearnerError` on a write error."""
        with disk_errors_raised(f"the uses of a step in {self.checkpoints}"):
            step_uses.append_step(self.checkpoints, uses)

    def reconcile(self, steps: int, sha256: str) -> None:
        """See `LearnerAccess.reconcile`."""
        uses = step_uses.recorded_steps(self.checkpoints, steps, sha256, self.store.entries())
        try:
            step_uses.rewrite_steps(self.checkpoints, uses)  # without the steps that will be repeated
        except OSError as error:
            raise StoreError(f"{self.checkpoints / step_uses.CONSUMED_FILE} cannot be written: {error.strerror or error}") from error
        self.store.reconcile(dict(enumerate(uses)))

    def record_setbacks(self, setbacks: tuple[UpdateFailure, ...]) -> None:
        """Appends setbacks to `failures/updates.jsonl`."""
        self._setbacks.append(setbacks)

    def forget_setbacks(self, step: int) -> None:
        """Removes the setbacks of `step` and of all later steps."""
        self._setbacks.remove_from(step)

    def pending_rollback(self) -> RollbackRequest | None:
        """Reads the request in the registry's folder."""
        return rollback.pending_request(self.folder / "versions", self.registry)

    def find_server(self) -> ServerAddress | None:
        """Reads the server's record in the run folder."""
        return announced_server(self.folder)

    def close(self) -> None:
        """Closes the store and the registry."""
        self.store.close()
        self.registry.close()

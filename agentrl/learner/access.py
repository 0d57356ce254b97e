"""A learner's access to its run: how it reads and writes the ledger, the registry, checkpoints, versions and records.

`FolderAccess` uses the run folder. `agentrl.learner.remote_access.RemoteAccess` is for a learner whose host does not share the driver's
disk; it uses a mirror of the run folder and calls the driver. A step is complete once `checkpoint_written` has returned, because the next
learner then finds its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import StoreError
from agentrl.experience import step_uses
from agentrl.experience.step_uses import StepUses
from agentrl.learner.driver_reports import UpdateFailureLog, disk_errors_raised
from agentrl.learner.update_guard import UpdateFailure
from agentrl.protocols import ExperienceStore, VersionRegistry
from agentrl.serving.access import ServerAddress, announced_server
from agentrl.version import rollback
from agentrl.version.rollback import RollbackRequest

if TYPE_CHECKING:  # the driver uses this module without torch
    from agentrl.learner.ranks import Ranks

Spare = Callable[[], Collection[int]]
"""Returns the numbers of the checkpoints that, at the time of the call, must not be deleted."""


class FolderAccess:
    """Access to a run folder on a disk that the learner shares with the driver.

    Every rank has an access object, but unless a method says otherwise, only rank 0 writes. Methods without a body have work to do only in
    `agentrl.learner.remote_access.RemoteAccess`.
    """

    poll_s = 0.05  # seconds between two checks of the ledger
    own_disk = False  # whether each host of the learner has its own `folder`

    def __init__(self, folder: Path, store: ExperienceStore, registry: VersionRegistry) -> None:
        self.folder, self.store, self.registry = folder, store, registry
        self.checkpoints = folder / "checkpoints"
        self._setbacks = UpdateFailureLog(folder)

    def prepare(self, alert: Callable[[str], None], ranks: Ranks) -> None:
        """Makes the newest intact checkpoint available in `folder`. Calls `alert` if a newer checkpoint is damaged. Must be called on all
        ranks."""

    def need_checkpoint(self, number: int, ranks: Ranks) -> None:
        """Makes checkpoint `number` available in `folder` if the run has it. Must be called on all ranks."""

    def checkpoint_written(self, folder: Path, spare: Spare, ranks: Ranks) -> None:
        """Returns once the complete checkpoint in `folder` is durably available to the next learner. If the ranks run on several hosts
        with their own disks, `folder` contains this host's files, and all ranks call this method; otherwise only rank 0 calls it."""

    def prune_checkpoints(self, keep: int, spare: Spare) -> None:
        """Deletes the driver's checkpoints, except the newest `keep` and those that `spare` returns. In a run folder,
        `agentrl.learner.checkpoint.save` has already deleted these checkpoints."""

    def version_written(self, folder: Path) -> None:
        """Returns once the servers can fetch the complete version in `folder`."""

    def base_probe_written(self) -> None:
        """Returns once the driver has the probe of version 0."""

    def tokens_recorded(self, step: int, rank: int) -> None:
        """Makes the tokens that a rank recorded in a step available to readers of the run (`agentrl.experience.token_records`).

        Each rank that records tokens calls this method after the version has been published.
        """

    def record_uses(self, uses: StepUses) -> None:
        """Durably records how the step after the last recorded step used its groups, before the checkpoint of that step is written.

        Raises `DiskFull` or `LearnerError` on a write error.
        """
        with disk_errors_raised(f"the uses of a step in {self.checkpoints}"):
            step_uses.append_step(self.checkpoints, uses)

    def reconcile(self, steps: int, sha256: str) -> None:
        """Restores the ledger and the recorded uses to those of the checkpoint after `steps` steps.

        Raises `StoreError` if the ledger or the recorded uses do not belong to that checkpoint, or if the uses cannot be written.

        Args:
            sha256: hash of the uses that the checkpoint recorded (`agentrl.experience.step_uses`).
        """
        uses = step_uses.recorded_steps(self.checkpoints, steps, sha256, self.store.entries())
        try:
            step_uses.rewrite_steps(self.checkpoints, uses)  # without the steps that will be repeated
        except OSError as error:
            raise StoreError(f"{self.checkpoints / step_uses.CONSUMED_FILE} cannot be written: {error.strerror or error}") from error
        self.store.reconcile(dict(enumerate(uses)))

    def record_setbacks(self, setbacks: tuple[UpdateFailure, ...]) -> None:
        """Appends setbacks to the run's setback log. Raises `DiskFull` or `LearnerError` on a write error."""
        self._setbacks.append(setbacks)

    def forget_setbacks(self, step: int) -> None:
        """Removes the setbacks of `step` and of all later steps."""
        self._setbacks.remove_from(step)

    def pending_rollback(self) -> RollbackRequest | None:
        """Returns the rollback that the gate or a user requested, or None if there is no request."""
        return rollback.pending_request(self.folder / "versions", self.registry)

    def find_server(self) -> ServerAddress | None:
        """Returns the server to which weights are sent over NCCL, or None if no server is running."""
        return announced_server(self.folder)

    def close(self) -> None:
        """Closes the store and the registry."""
        self.store.close()
        self.registry.close()

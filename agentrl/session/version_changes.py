"""Changes to the versions of a run at the request of a user: promote, pin, and return to an earlier version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import has_intact_files, numbered_folders
from agentrl.base.run_lock import drive_folder
from agentrl.config.recipe import Recipe, load
from agentrl.errors import RunFolderBusy, UserError
from agentrl.records import PolicyVersion, VersionState
from agentrl.session.models import export_model
from agentrl.session.versions import checkpoint_folder, open_registry
from agentrl.version import FolderRegistry, rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedRollback:
    """A rollback that the learner will perform instead of its next update."""

    to: int
    undone: tuple[int, ...]  # versions that the rollback undoes
    live: bool  # whether a driver is running, whose learner will perform the rollback
    needs_steps: bool  # whether the run has finished all its steps, so that it continues only if it gets more steps
    replaced: int | None  # target of the pending request that this request replaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """A promoted version."""

    number: int
    model: Path | None  # folder to which the version was exported; None while a driver is running
    newest: int  # the newest promoted version


def known_version(registry: FolderRegistry, number: int) -> PolicyVersion:
    """Returns a version of a run. Raises `UserError` if the version is unknown."""
    version = registry.get(number)
    if version is None:
        numbers = [version.number for version in registry.versions()]
        fix = f"choose one of its versions: {numbers[0]} to {numbers[-1]}" if numbers else "start the run; it has no versions yet"
        raise UserError(f"{registry.folder.parent} has no version {number}", fix=fix)
    return version


def set_pinned(run_dir: Path, number: int, *, pinned: bool) -> None:
    """Pins or unpins a version. The weights and the checkpoint of a pinned version are not deleted. Idempotent.

    Raises `UserError` if the version is unknown, or if the version is to be pinned and its weights were deleted.
    """
    registry = open_registry(run_dir)
    version = known_version(registry, number)
    registry.pin(number, pinned=pinned)
    if not pinned:
        return
    try:
        require_weights(registry, version)  # checked after pinning, so that no other process can delete the weights afterwards
    except UserError:
        registry.pin(number, pinned=False)
        raise


def require_weights(registry: FolderRegistry, version: PolicyVersion) -> None:
    """Raises `UserError` if the weights of a version were deleted."""
    folder = registry.path(version)
    if not (folder / version.weights).is_file() and not (folder / "delta.json").is_file():
        raise UserError(
            f"the weights of version {version.number} of {registry.folder.parent} were deleted",
            fix=f"choose a different version (agentrl versions list {registry.folder.parent}); to keep more, pin versions or raise"
            " learner.keep_versions",
        )


def promote(run_dir: Path, number: int) -> Promotion:
    """Promotes a version, and exports it to `model/` if no driver is running. Idempotent.

    Raises `UserError` if the version is unknown, was rolled back, has no weights, lacks a checkpoint that the gate needs, or cannot be
    promoted during the run, and `StoreError` if its weights are damaged.
    """
    registry = open_registry(run_dir)
    version = known_version(registry, number)
    if version.state is VersionState.ROLLED_BACK:
        raise UserError(f"version {number} of {run_dir} was rolled back and cannot serve again", fix="promote a different version")
    require_weights(registry, version)
    registry.verify(version)
    recipe = run_recipe(run_dir)
    if recipe.gate is not None and recipe.gate.rolls_back and not has_checkpoint(run_dir, number):
        raise UserError(
            f"version {number} of {run_dir} has no intact checkpoint, so the gate could not roll back to it", fix=_with_checkpoints(run_dir)
        )
    try:
        with _stopped(run_dir, "promote"):
            registry.set_state(number, VersionState.PROMOTED, sha256=version.sha256)
            model, base = run_dir / "model", run_dir / "versions" / "000000"
            export_model(registry.path(version), model, base=base, sampling=recipe.evaluation.sampling)
    except RunFolderBusy as busy:
        serving = registry.latest(VersionState.SERVING, VersionState.PROMOTED)
        if recipe.gate is None:
            raise UserError(f"{run_dir} has no gate, so its result is its last version: {busy.message}", fix=busy.fix) from None
        if version.state is VersionState.CANDIDATE and (serving is None or number > serving.number):
            raise UserError(f"version {number} has not served yet", fix="wait until the version serves") from None
        registry.set_state(number, VersionState.PROMOTED, sha256=version.sha256)
        model = None
    newest = registry.latest(VersionState.PROMOTED)
    assert newest is not None, "a version was promoted"
    return Promotion(number=number, model=model, newest=newest.number)


def request_rollback(run_dir: Path, number: int) -> RequestedRollback:
    """Requests that the server and the learner return to a version, with its weights, optimizer, random state and schedule.

    The learner performs the rollback instead of its next update: at once in a live run, otherwise after `--resume`. The request replaces a
    pending request. Raises `UserError` if the version is unknown, was rolled back, already has the newest weights, or has no intact
    checkpoint.
    """
    registry = open_registry(run_dir)
    target, versions, steps = known_version(registry, number), registry.versions(), run_recipe(run_dir).step_limit
    newest = next(version for version in reversed(versions) if version.state is not VersionState.ROLLED_BACK)
    if target.state is VersionState.ROLLED_BACK:
        raise UserError(f"version {number} of {run_dir} was rolled back and cannot serve again", fix="choose an earlier version")
    if target.sha256 == newest.sha256:
        raise UserError(
            f"version {newest.number}, the newest of {run_dir}, already has the weights of version {number}",
            fix="choose an earlier version",
        )
    pending = rollback.pending_request(run_dir / "versions", registry)
    request = rollback.RollbackRequest(
        version=newest.number,
        sha256=newest.sha256,
        to=number,
        to_sha256=target.sha256,
        reason="agentrl versions rollback",
        by_user=True,
    )
    rollback.request_rollback(run_dir / "versions", request)  # written first: from now on the learner keeps the checkpoint
    if not has_checkpoint(run_dir, number):
        _restore(run_dir, pending)
        raise UserError(f"version {number} of {run_dir} has no intact checkpoint of the learner", fix=_with_checkpoints(run_dir))
    return RequestedRollback(
        to=number,
        undone=tuple(version.number for version in versions if version.number > number and version.state is not VersionState.ROLLED_BACK),
        live=is_driven(run_dir),
        needs_steps=newest.number >= steps,
        replaced=None if pending is None else pending.to,
    )


def cancel_rollback(run_dir: Path) -> int:
    """Withdraws the user's pending rollback request and returns its target. Raises `UserError` if no rollback requested by a user is
    pending."""
    registry = open_registry(run_dir)
    pending = rollback.pending_request(run_dir / "versions", registry)
    if pending is None:
        raise UserError(f"{run_dir} has no pending rollback", fix=f"list its versions: agentrl versions list {run_dir}")
    if not pending.by_user:
        raise UserError(
            f"the gate, not a user, requested the rollback to version {pending.to}", fix="request a rollback to a different version"
        )
    rollback.withdraw_request(run_dir / "versions")
    return pending.to


def _restore(run_dir: Path, pending: rollback.RollbackRequest | None) -> None:
    if pending is None:
        rollback.withdraw_request(run_dir / "versions")
    else:
        rollback.request_rollback(run_dir / "versions", pending)


def has_checkpoint(run_dir: Path, number: int) -> bool:
    """Whether the run has an intact checkpoint of a version."""
    return has_intact_files(checkpoint_folder(run_dir, number))


def _with_checkpoints(run_dir: Path) -> str:
    """Returns the suggested fix for an error about a missing checkpoint."""
    numbers = [int(path.name) for path in numbered_folders(run_dir / "checkpoints")]
    intact = [str(number) for number in numbers if has_checkpoint(run_dir, number)]
    choose = f"choose a version with a checkpoint: {', '.join(intact)}" if intact else "no version has a checkpoint"
    return f"{choose}; to keep more, pin versions or raise learner.keep_checkpoints"


def run_recipe(run_dir: Path) -> Recipe:
    """Returns the recipe of a run. Raises `UserError` if the folder contains no recipe, and the errors of `agentrl.config.recipe.load`."""
    if not (run_dir / "recipe.json").is_file():
        raise UserError(f"{run_dir} contains no run", fix="give the folder of a run, such as runs/quickstart")
    return load(run_dir / "recipe.json")


@contextmanager
def _stopped(run_dir: Path, verb: str) -> Iterator[None]:
    """Locks the run during the block, so that no other process can drive it. Raises `RunFolderBusy`."""
    with drive_folder(run_dir, command=f"agentrl versions {verb} {run_dir}"):
        yield


def is_driven(run_dir: Path) -> bool:
    """Whether a driver of the run is running."""
    try:
        with _stopped(run_dir, "rollback"):
            return False
    except RunFolderBusy:
        return True

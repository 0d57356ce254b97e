"""Estimates the disk space of a training run from its model before the run starts."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.version.deltas import read_safetensors_header

_WORTH_SAYING = 2 << 30  # bytes above which a note is printed above which a note is printed
_MASTERS = 12  # bytes per trained weight in a checkpoint in addition to the weight: a float32 master and two optimizer moments


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """The disk space that a run needs."""

    base: int  # bytes of the copy of the initial model
    version: int  # bytes of one policy version
    checkpoint: int  # bytes of one checkpoint
    versions: int  # number of versions on the disk, including the one that is being written
    checkpoints: int  # number of checkpoints on the disk, including the one that is being written

    @property
    def first(self) -> int:
        """Bytes until the first step is done."""
        return self.base + self.version + self.checkpoint

    @property
    def total(self) -> int:
        """Maximum bytes, including the result."""
        return 2 * self.base + self.versions * self.version + self.checkpoints * self.checkpoint


def required_disk_space(recipe: Recipe, model: Path) -> DiskSpace:
    """The disk space for a run that starts from `model`, a folder of safetensors. Experience and logs are not included."""
    shapes = [entry["shape"] for path in model.glob("*.safetensors") for entry in read_safetensors_header(path).values()]
    width = 2 if recipe.policy.dtype == "bfloat16" else 4
    learner, weights = recipe.learner, sum(map(math.prod, shapes))
    trained = weights if learner.lora is None else sum(learner.lora.rank * sum(shape) for shape in shapes if len(shape) == 2)
    critics = 2 if recipe.critic is not None else 1
    return DiskSpace(
        base=weights * width,
        version=trained * width,
        checkpoint=critics * trained * (width + _MASTERS),
        versions=learner.keep_versions * (1 if recipe.gate is None else 2) + 1,
        checkpoints=learner.keep_checkpoints + 1,
    )


def check_disk_space(recipe: Recipe, model: Path, folder: Path) -> tuple[str, ...]:
    """Notes on the disk space that a run needs in its folder; empty if it needs little and the disk has enough.

    Raises `UserError` if the first step does not fit on the disk.
    """
    wanted, replaced = required_disk_space(recipe, model), _replaced_bytes(folder)
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    parts = (
        f"{wanted.versions} versions of {_gib(wanted.version)} (learner.keep_versions={recipe.learner.keep_versions})"
        f" and {wanted.checkpoints} checkpoints of {_gib(wanted.checkpoint)} (learner.keep_checkpoints={recipe.learner.keep_checkpoints})"
    )
    fix = "free space, choose a --run-dir on another disk, or lower learner.keep_checkpoints and learner.keep_versions"
    if wanted.first > free + replaced:
        raise UserError(f"{folder}: the first step needs about {_gib(wanted.first)}, and {_gib(free)} are free on this disk", fix=fix)
    if wanted.total > free + replaced:
        return (f"the run needs up to {_gib(wanted.total)} in {folder}, and {_gib(free)} are free: {parts}\n  fix: {fix}",)
    return (f"the run stores up to {_gib(wanted.total)} in {folder}: {parts}",) if wanted.total >= _WORTH_SAYING else ()


def _replaced_bytes(folder: Path) -> int:
    """Bytes of the versions and checkpoints that a resumed run already has and will replace."""
    files = (path for name in ("versions", "checkpoints") for path in (folder / name).rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

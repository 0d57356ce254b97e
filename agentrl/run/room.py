"""What a training run keeps on its disk, estimated from the model before anything starts."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UserError
from agentrl.recipe import Recipe

_WORTH_SAYING = 2 << 30  # bytes
_MASTERS = 12  # bytes of a trained weight in a checkpoint besides the weight: its float32 master and two moments of the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that a run needs."""

    base: int  # the copy of the model that it begins with
    version: int  # one of the policy's versions
    checkpoint: int
    versions: int  # kept, with the one that is being written
    checkpoints: int

    @property
    def first(self) -> int:
        """Until the first step is done."""
        return self.base + self.version + self.checkpoint

    @property
    def total(self) -> int:
        """At most, with the result."""
        return 2 * self.base + self.versions * self.version + self.checkpoints * self.checkpoint


def room(recipe: Recipe, model: Path) -> Room:
    """The room for a run that begins with `model`, a folder of safetensors. Experience and logs come on top."""
    shapes = list(_shapes(model))
    width = 2 if recipe.policy.dtype == "bfloat16" else 4
    learner, weights = recipe.learner, sum(map(math.prod, shapes))
    trained = weights if learner.lora is None else sum(learner.lora.rank * sum(shape) for shape in shapes if len(shape) == 2)
    critics = 2 if recipe.critic is not None else 1
    return Room(
        base=weights * width,
        version=trained * width,
        checkpoint=critics * trained * (width + _MASTERS),
        versions=learner.keep_versions * (1 if recipe.gate is None else 2) + 1,
        checkpoints=learner.keep_checkpoints + 1,
    )


def check_room(recipe: Recipe, model: Path, folder: Path) -> tuple[str, ...]:
    """What a person should know of the room that a run needs in its folder; empty for little of it on a disk with enough.

    Raises `UserError` if the disk would be full before the first step is done.
    """
    wanted, held = room(recipe, model), _held(folder)
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    parts = (
        f"{wanted.versions} versions of {_gib(wanted.version)} (learner.keep_versions={recipe.learner.keep_versions})"
        f" and {wanted.checkpoints} checkpoints of {_gib(wanted.checkpoint)} (learner.keep_checkpoints={recipe.learner.keep_checkpoints})"
    )
    fix = "free space, choose a --run-dir on another disk, or lower learner.keep_checkpoints and learner.keep_versions"
    if wanted.first > free + held:
        raise UserError(f"{folder}: the first step needs about {_gib(wanted.first)}, and {_gib(free)} are free on this disk", fix=fix)
    if wanted.total > free + held:
        return (f"the run needs up to {_gib(wanted.total)} in {folder}, and {_gib(free)} are free: {parts}\n  fix: {fix}",)
    return (f"the run keeps up to {_gib(wanted.total)} in {folder}: {parts}",) if wanted.total >= _WORTH_SAYING else ()


def _shapes(model: Path) -> Iterator[tuple[int, ...]]:
    """The shapes of a model's tensors, from the headers of its files, which have been checked."""
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        yield from (tuple(one["shape"]) for name, one in header.items() if name != "__metadata__")


def _held(folder: Path) -> int:
    """Bytes of versions and checkpoints that a resumed run has already, and replaces."""
    files = (path for name in ("versions", "checkpoints") for path in (folder / name).rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

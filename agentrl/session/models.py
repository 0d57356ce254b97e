"""The model of a run: its source, the copy of it that is version 0, and the exported result.

Also estimates, before a training run starts, the disk space that it needs.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import commit_folder, partial_folder, write_atomically
from agentrl.config.recipe import Recipe
from agentrl.config.rollout import SamplingConfig
from agentrl.errors import StoreError, UserError
from agentrl.records import ADAPTER, WHOLE_MODEL
from agentrl.version import deltas
from agentrl.version.deltas import read_safetensors_header
from agentrl.version.model_folder import check_model_files, write_chat_template

SAMPLING_FILE = "agentrl_sampling.json"
"""File in a run's result folder `model/` that contains `evaluation.sampling` from the run's recipe, for later evaluations of that
folder."""
# Files of a version in addition to the model and its probe logprobs:
_OF_A_VERSION = ("version.json", "update.json", deltas.DELTA_RECORD, deltas.DELTA_FILE)


def find_model(model: str, root: Path, *, chat_template: bool = True, key: str = "policy.model") -> Path:
    """Returns the folder of a model: a folder of the project, or a Hugging Face id from the local cache or the hub.

    Completes a version of a run that is stored as a delta. Raises `UserError` if no such model exists, if it cannot be downloaded or
    completed, or if one of its files (including a required `chat_template`) is missing or truncated.
    """
    folder = (root / model).resolve()
    if (folder / deltas.DELTA_RECORD).is_file():  # a version of a run
        try:
            deltas.materialize(folder)
        except ValueError as error:
            raise UserError(f"{key}: {error}", fix="use a different version of that run, or its model/ folder") from error
    if not folder.is_dir():
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise UserError(
                f"{key}: there is no folder {folder}", fix="use a folder of the project, or a Hugging Face id such as Qwen/Qwen3-0.6B"
            )
        folder = _download(model, key)
    check_model_files(folder, chat_template=chat_template, key=key)
    return folder


def _download(model: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except RepositoryNotFoundError:
        raise UserError(f"{key}: {model!r} is neither a folder nor a model on the Hugging Face Hub", fix="check the spelling") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{key}: {model!r} is not a folder here and could not be downloaded ({type(error).__name__})",
            fix="check the path or the network, or download it first and use its folder",
        ) from error


def copy_base_version(model: Path, target: Path, *, template: str | None = None) -> None:
    """Copies the base policy atomically into the run folder as version 0, so that later changes to the source do not affect the run. Does
    nothing if `target` exists.

    A chat `template` from the recipe replaces the template in the model. This template is copied from version 0 into every version and into
    the result.
    """
    if target.exists():
        return
    partial = partial_folder(target)
    single = (model / WHOLE_MODEL).is_file()
    for source in sorted(model.iterdir()):
        if source.is_file() and source.name not in _OF_A_VERSION and (single or ".safetensors" not in source.name):
            shutil.copy2(source.resolve(), partial / source.name)
    if not single:
        _merge_shards(sorted(model.glob("*.safetensors")), partial / WHOLE_MODEL)
    if template is not None:
        write_chat_template(partial, template)
    commit_folder(partial, target)


def copy_version(source: Path, target: Path, *, weights: str) -> None:
    """Copies a published version atomically to a different run folder: its complete weights or adapter, and the files that a server needs
    to load them.

    Raises `StoreError` if the weights are missing or damaged, or if a file cannot be copied.
    """
    partial = partial_folder(target)
    try:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in _OF_A_VERSION:
                shutil.copy2(path, partial / path.name)
        if not (partial / weights).exists():
            deltas.write_complete(source, partial / weights)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot copy {source}: {error}") from error
    commit_folder(partial, target)


def _merge_shards(shards: list[Path], target: Path) -> None:
    """Merges the shards of a model into one file, because a version has one weight file with one hash."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    save_file(tensors, target, metadata={"format": "pt"})


def export_model(source: Path, target: Path, *, base: Path, sampling: SamplingConfig) -> None:
    """Writes the policy as a Hugging Face folder, with hard links if the file system supports them. Replaces an older export.

    An adapter version is merged with `base`, and also copied unmerged to `adapter/` next to `target`. `sampling`, the settings of the run's
    evaluations, is stored with the policy. Raises `StoreError` if the base of a delta version is missing or damaged.
    """
    if not (source / ADAPTER).is_file():
        try:
            deltas.materialize(source)
        except ValueError as error:
            raise StoreError(str(error)) from error
        _export(source, target, sampling=sampling)
        return
    from agentrl.version.adapters import merge_folder

    _export(source, target.with_name("adapter"))
    _export(base, target, weights=lambda file: merge_folder(base, source, file), probe=source / "probe.json", sampling=sampling)


def _export(
    source: Path,
    target: Path,
    *,
    weights: Callable[[Path], None] | None = None,
    probe: Path | None = None,
    sampling: SamplingConfig | None = None,
) -> None:
    """Copies a version's folder without the files that only the run needs.

    Args:
        weights: writes the weight file; None copies the weight file of the source.
        probe: file with the probe logprobs of these weights; None copies the file of the source, if there is one.
        sampling: written as `SAMPLING_FILE`.
    """
    partial = partial_folder(target)
    if weights is not None:
        weights(partial / WHOLE_MODEL)
    if sampling is not None:
        write_atomically(partial / SAMPLING_FILE, sampling.model_dump_json() + "\n")
    if probe is not None:
        _link_or_copy(probe, partial / probe.name)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in _OF_A_VERSION and not (partial / file.name).exists():
            _link_or_copy(file, partial / file.name)
    commit_folder(partial, target)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


_WORTH_SAYING = 2 << 30  # minimum number of bytes for which a note is printed
_MASTERS = 12  # bytes per trained weight in a checkpoint in addition to the weight: a float32 master copy and two optimizer moments


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
        """The number of bytes that the run needs until the first step is done."""
        return self.base + self.version + self.checkpoint

    @property
    def total(self) -> int:
        """The maximum number of bytes that the run needs, including the result."""
        return 2 * self.base + self.versions * self.version + self.checkpoints * self.checkpoint


def required_disk_space(recipe: Recipe, model: Path) -> DiskSpace:
    """Returns the disk space needed by a run that starts from `model`, a folder with safetensors files. Experience and logs are not
    included."""
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
    """Returns notes about the disk space that a run needs in its folder; empty if the run needs less than 2 GiB and the disk has enough.

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
        raise UserError(f"{folder}: the first step needs about {_gib(wanted.first)}, but only {_gib(free)} are free on this disk", fix=fix)
    if wanted.total > free + replaced:
        return (f"the run needs up to {_gib(wanted.total)} in {folder}, but only {_gib(free)} are free: {parts}\n  fix: {fix}",)
    return (f"the run stores up to {_gib(wanted.total)} in {folder}: {parts}",) if wanted.total >= _WORTH_SAYING else ()


def _replaced_bytes(folder: Path) -> int:
    """Returns the size in bytes of the versions and checkpoints that a resumed run already has and will replace."""
    files = (path for name in ("versions", "checkpoints") for path in (folder / name).rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

"""Everything that can be checked before a run starts anything: model, disk, run folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from agentrl import deltas
from agentrl.errors import RecipeError, StoreError, UserError
from agentrl.recipe import Recipe, load

_FREE_BYTES = 1 << 30
WEIGHTS = "model.safetensors"
_OF_A_VERSION = ("version.json", "update.json", "probe.json", deltas.RECORD, deltas.FRAMES)  # beside the model that it is
_MODEL_FILES = ("config.json", "tokenizer_config.json")


def find_model(model: str, root: Path) -> Path:
    """The folder of a model: a folder of the project, else a Hugging Face id from the local cache or the hub.

    Raises `UserError` when there is none, or when a file is missing in it.
    """
    folder = (root / model).resolve()
    if (folder / deltas.RECORD).is_file():  # a version of a run
        try:
            deltas.materialize(folder)
        except ValueError as error:
            raise UserError(f"policy.model: {error}", fix="take another version of that run, or its model/ folder") from error
    if not folder.is_dir():
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise UserError(
                f"policy.model: no folder {folder}", fix="give a folder of the project, or a Hugging Face id such as Qwen/Qwen3-0.6B"
            )
        folder = _download(model)
    missing = [name for name in _MODEL_FILES if not (folder / name).is_file()]
    if missing or not list(folder.glob("*.safetensors")):
        wanted = ", ".join([*missing, *([] if list(folder.glob("*.safetensors")) else ["*.safetensors"])])
        raise UserError(f"policy.model: {folder} lacks {wanted}", fix="save it with save_pretrained for the model and for its tokenizer")
    return folder


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except RepositoryNotFoundError:
        raise UserError(f"policy.model: {model!r} is neither a folder nor a model on the hub", fix="check the spelling") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"policy.model: {model!r} is not a folder here and could not be downloaded ({type(error).__name__})",
            fix="check the path or the network, or download it first and give its folder",
        ) from error


def open_run_folder(recipe: Recipe, run_dir: Path, *, resume: bool) -> None:
    """Makes the run folder with its `recipe.json`, or checks that an old one can be continued with this recipe."""
    saved = run_dir / "recipe.json"
    if saved.exists() and not resume:
        raise UserError(
            f"{run_dir} already holds a run", fix=f"continue it with --resume, or choose another --run-dir (or delete {run_dir})"
        )
    if resume and not saved.exists():
        raise UserError(f"{run_dir} holds no run to resume", fix="leave out --resume to start one")
    if resume:
        _check_same(load(saved), recipe)
    check_disk(run_dir)
    for name in ("episodes", "versions", "checkpoints", "logs"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    beside = run_dir / ".recipe.json.part"
    beside.write_text(recipe.model_dump_json(indent=2) + "\n")
    beside.replace(saved)


def _check_same(old: Recipe, new: Recipe) -> None:
    """What was sampled under one recipe may not be trained under another; only length and placement may change."""
    placement = {"ranks", "threads", "keep_checkpoints", "keep_versions", "limits", "max_bad_updates", "max_bad_groups", "full_every"}
    free: Any = {"steps": True, "sandbox": True, "serving": True, "evaluation": True, "learner": placement}
    before, after = old.model_dump(exclude=free), new.model_dump(exclude=free)
    changed = sorted(key for key in before if before[key] != after[key])
    if changed:
        raise RecipeError(
            f"--resume: the recipe differs from the run's own in: {', '.join(changed)}",
            fix="resume with the same recipe and overrides (steps, sandbox, serving, evaluation, learner.ranks, .threads and .limits"
            " may change)",
        )


def check_disk(run_dir: Path) -> None:
    """Refuses to start on a disk that will be full before the first checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run_dir).free
    if free < _FREE_BYTES:
        raise UserError(f"{run_dir}: only {free >> 20} MiB are free on this disk", fix="free at least 1 GiB, or choose another --run-dir")
    if not os.access(run_dir, os.W_OK):
        raise UserError(f"{run_dir} is not writable", fix="choose another --run-dir")


def place_base_version(model: Path, target: Path) -> None:
    """Copies the base policy into the run folder as version 0, beside and renamed; a later change of the source cannot reach it."""
    if target.exists():
        return
    beside = target.with_name(f".{target.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    single = (model / WEIGHTS).is_file()
    for source in sorted(model.iterdir()):
        if source.is_file() and source.name not in _OF_A_VERSION and (single or ".safetensors" not in source.name):
            shutil.copy2(source.resolve(), beside / source.name)
    if not single:
        _merge_shards(sorted(model.glob("*.safetensors")), beside / WEIGHTS)
    beside.rename(target)


def _merge_shards(shards: list[Path], target: Path) -> None:
    """A version is one weight file with one hash, so a model that was downloaded in shards is joined."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    save_file(tensors, target, metadata={"format": "pt"})


def export_model(source: Path, target: Path) -> None:
    """The policy as a Hugging Face folder of its own (hard links where the disk allows); replaces an older export.

    Raises `StoreError` when the version is a delta that cannot be made whole.
    """
    try:
        deltas.materialize(source)
    except ValueError as error:
        raise StoreError(str(error)) from error
    beside = target.with_name(f".{target.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in _OF_A_VERSION:
            _link_or_copy(file, beside / file.name)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

"""Everything that can be checked before a run starts anything: model, disk, run folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl import deltas
from agentrl.errors import RecipeError, StoreError, UserError
from agentrl.recipe import Recipe, load
from agentrl.records import ADAPTER, WHOLE_MODEL

_FREE_BYTES = 1 << 30
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


def check_model(folder: Path, recipe: Recipe) -> None:
    """Raises `UserError` for a model that cannot be trained as the recipe says: its context, its weights or its vocabulary do not fit."""
    config = _json(folder / "config.json")
    inner = config.get("text_config") or config
    longest, stretched = inner.get("max_position_embeddings"), _stretched(inner)
    if longest is not None and not stretched and recipe.policy.max_model_len > longest:
        raise UserError(
            f"policy.max_model_len={recipe.policy.max_model_len}, but the model in {folder} has a context of {longest} tokens",
            fix=f"set policy.max_model_len={longest} or less",
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "integers")
        raise UserError(f"the weights in {folder} are quantized ({method}) and cannot be trained", fix="use the model's float weights")
    vocabulary, largest = inner.get("vocab_size"), _largest_token(folder / "tokenizer.json")
    if vocabulary is not None and largest is not None and largest >= vocabulary:
        raise UserError(
            f"the tokenizer in {folder} knows token {largest}, but the model's vocabulary has {vocabulary}",
            fix="model.resize_token_embeddings(len(tokenizer)), or save the tokenizer that belongs to the model",
        )


def _stretched(config: dict[str, Any]) -> bool:
    """Whether positions are scaled, so that the context is longer than the configuration's number."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return "factor" in scaling


def _largest_token(path: Path) -> int | None:
    """The largest token id of a tokenizer.json; None where there is none to read it from."""
    if not path.is_file():
        return None
    tokenizer = _json(path)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))  # a list: its places are the ids
    return max([*ids, *(added["id"] for added in tokenizer.get("added_tokens", []))], default=None)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", fix="save the model and its tokenizer again with save_pretrained") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object", fix="save the model and its tokenizer again with save_pretrained")
    return found


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
    placement = {"ranks", "sequence_parallel", "zero_stage", "threads", "keep_checkpoints", "keep_versions", "full_every"}
    bounds = {"limits", "max_bad_updates", "max_bad_groups"}
    safety = {"checkpoint_turns", "max_quarantined", "max_fault_rate"}
    free: Any = {"steps": True, "sandbox": True, "serving": True, "evaluation": True, "learner": placement | bounds, "rollout": safety}
    before, after = old.model_dump(exclude=free), new.model_dump(exclude=free)
    changed = sorted(key for key in before if before[key] != after[key])
    if changed:
        raise RecipeError(
            f"--resume: the recipe differs from the run's own in: {', '.join(changed)}",
            fix="resume with the same recipe and overrides (docs/recipes.md lists what may change)",
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
    single = (model / WHOLE_MODEL).is_file()
    for source in sorted(model.iterdir()):
        if source.is_file() and source.name not in _OF_A_VERSION and (single or ".safetensors" not in source.name):
            shutil.copy2(source.resolve(), beside / source.name)
    if not single:
        _merge_shards(sorted(model.glob("*.safetensors")), beside / WHOLE_MODEL)
    beside.rename(target)


def _merge_shards(shards: list[Path], target: Path) -> None:
    """A version is one weight file with one hash, so a model that was downloaded in shards is joined."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    save_file(tensors, target, metadata={"format": "pt"})


def export_model(source: Path, target: Path, *, base: Path) -> None:
    """The policy as a Hugging Face folder of its own (hard links where the disk allows); replaces an older export.

    A version that is an adapter becomes a whole model, merged with `base`, and is kept as it is in `adapter/` beside it.
    Raises `StoreError` when the version is a delta that cannot be made whole.
    """
    if not (source / ADAPTER).is_file():
        try:
            deltas.materialize(source)
        except ValueError as error:
            raise StoreError(str(error)) from error
        _export(source, target)
        return
    from agentrl.serving.adapter import merge_folder

    _export(source, target.with_name("adapter"))
    _export(base, target, weights=lambda file: merge_folder(base, source, file))


def _export(source: Path, target: Path, *, weights: Callable[[Path], None] | None = None) -> None:
    """Copies a version's folder, without what only the run needs. `weights` writes the weights' file, in place of the source's."""
    beside = target.with_name(f".{target.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    if weights is not None:
        weights(beside / WHOLE_MODEL)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in _OF_A_VERSION and not (beside / file.name).exists():
            _link_or_copy(file, beside / file.name)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

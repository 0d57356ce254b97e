"""The model of a run: its source, its copy as version 0, and the exported result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from agentrl.base.files import commit_folder, partial_folder, write_atomically
from agentrl.config.rollout import SamplingConfig
from agentrl.errors import StoreError, UserError
from agentrl.records import ADAPTER, WHOLE_MODEL
from agentrl.version import deltas
from agentrl.version.model_folder import check_model_files, write_chat_template

SAMPLING_FILE = "agentrl_sampling.json"
"""File in a run's result `model/`: `evaluation.sampling` of the run's recipe, for later evaluations of the folder."""
_OF_A_VERSION = (
    "version.json",
    "update.json",
    deltas.DELTA_RECORD,
    deltas.DELTA_FILE,
)  # in addition to the model and its reference logprobs


def find_model(model: str, root: Path, *, chat_template: bool = True, key: str = "policy.model") -> Path:
    """Returns the folder of a model: a folder of the project, or a Hugging Face id from the local cache or the hub.

    Raises `UserError` if no such model exists, or a file of it (including a required `chat_template`) is missing or truncated.
    """
    folder = (root / model).resolve()
    if (folder / deltas.DELTA_RECORD).is_file():  # a version of a run
        try:
            deltas.materialize(folder)
        except ValueError as error:
            raise UserError(f"{key}: {error}", fix="use another version of that run, or its model/ folder") from error
    if not folder.is_dir():
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise UserError(f"{key}: no folder {folder}", fix="use a folder of the project, or a Hugging Face id such as Qwen/Qwen3-0.6B")
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
        raise UserError(f"{key}: {model!r} is neither a folder nor a model on the hub", fix="check the spelling") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{key}: {model!r} is not a folder here and could not be downloaded ({type(error).__name__})",
            fix="check the path or the network, or download it first and use its folder",
        ) from error


def copy_base_version(model: Path, target: Path, *, template: str | None = None) -> None:
    """Copies the base policy atomically into the run folder as version 0, so that later changes of the source do not affect the run.

    A chat `template` of the recipe replaces the model's own, and is copied from here into every version and into the result.
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


def _merge_shards(shards: list[Path], target: Path) -> None:
    """Joins a sharded model, because a version is one weight file with one hash."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    save_file(tensors, target, metadata={"format": "pt"})


def export_model(source: Path, target: Path, *, base: Path, sampling: SamplingConfig) -> None:
    """Writes the policy as a Hugging Face folder (with hard links if the disk allows) and replaces an older export.

    An adapter version is merged with `base`, and also copied unmerged to `adapter/` next to it. `sampling`, from the run's evaluations, is
    stored with it. Raises `StoreError` for a delta version whose base is missing.
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
        weights: writes the weight file; None copies the source's.
        probe: file with the probe logprobs of these weights; None copies the source's, if it has one.
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

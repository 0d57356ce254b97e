"""The end of the file weight channel that runs inside vLLM: maps a version's safetensors files and loads them in place.

Works wherever server and learner see one file system, on CPU and GPU alike. Everything that can be wrong with a version is
checked before the first parameter is touched, because vLLM's layerwise reload moves parameters aside as it begins: a
refused file leaves the old weights serving untouched.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_HEADER_LIMIT = 100 * 2**20  # the format's own bound on its JSON header


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM's types are not followed
    """Which folder versions may be loaded from; said once, right after the server has started."""

    versions_folder: str


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One version: its folder and the byte size of each of its safetensors files."""

    folder: str
    files: dict[str, int]

    def paths(self, versions_folder: Path, first_folder: Path) -> list[Path]:
        """The files, each proven whole and in a folder below `versions_folder` or in `first_folder`. Raises `ValueError`."""
        folder = Path(self.folder).resolve()
        if folder != first_folder and (folder == versions_folder or not folder.is_relative_to(versions_folder)):
            raise ValueError(f"weights folder {folder} is not below the run's versions folder {versions_folder}")
        if not self.files:
            raise ValueError(f"no weight files named for {folder}")
        paths = []
        for name, size in self.files.items():
            path = folder / name
            if Path(name).name != name or path.resolve().parent != folder:
                raise ValueError(f"weight file {name!r} lies outside {folder}")
            if not path.is_file() or path.stat().st_size != size:
                raise ValueError(f"weight file {path} is missing or not {size} bytes long")
            paths.append(path)
        return paths


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a safetensors file, read from its header alone.

    Raises `ValueError` when the file is not safetensors (format: https://github.com/huggingface/safetensors#format).
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        if length > _HEADER_LIMIT:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def check_same_shapes(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ValueError` naming the first tensor that is missing, unknown or of another shape."""
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(f"tensor {name}: the served model has shape {expected.get(name)}, the new version {given.get(name)}")


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):  # type: ignore[misc]
    """Loads full versions from files. One `update_weights` call carries a whole version."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._versions_folder: Path | None = None
        self._tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        self._first_folder = Path(self.model_config.model).resolve()  # the server was started with it, so it may go back to it
        self._shapes = self._untied(_all_shapes(sorted(self._first_folder.glob("*.safetensors"))))

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        folder = Path(init_info.versions_folder).resolve()
        if self._versions_folder not in (None, folder):
            raise ValueError(f"versions folder is already set to {self._versions_folder}")
        self._versions_folder = folder

    def start_weight_update(self) -> None:
        """Nothing yet: the reload begins in `receive_weights`, once the files are known to fit."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        if self._versions_folder is None:
            raise RuntimeError("the versions folder was never set: call init_transfer_engine first")
        paths = update_info.paths(self._versions_folder, self._first_folder)
        check_same_shapes(self._shapes, self._untied(_all_shapes(paths)))
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(self._tensors(paths))
        finally:
            # Also after a failure: parameters that were not reached get their old values back, so that the model can
            # go on computing until the caller loads a whole version again.
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing left to do: `receive_weights` ends with the model whole."""

    def shutdown(self) -> None:
        """Holds nothing between updates."""

    def _untied(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in shapes.items() if not (self._tied and name == LM_HEAD)}

    def _tensors(self, paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
        for path in paths:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                    if self._tied and name == LM_HEAD:
                        continue
                    tensor = file.get_tensor(name)
                    yield name, tensor
                    if self._tied and name == EMBEDDING:
                        # Tied or not, vLLM's CPU kernels keep a packed copy of the output head. Unless the head is sent
                        # under its own name that copy goes stale, and every route still answers 200.
                        yield LM_HEAD, tensor


def _all_shapes(paths: list[Path]) -> dict[str, tuple[int, ...]]:
    return {name: shape for path in paths for name, shape in tensor_shapes(path).items()}

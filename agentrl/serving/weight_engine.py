"""The file weight channel's engine inside vLLM: memory-maps a version's safetensors files and loads them in place, on CPU and GPU.

A version is checked completely before the first parameter is touched, because vLLM's layerwise reload starts by moving parameters away.
Therefore, if a file is rejected, the old weights keep serving. A delta (`agentrl.version.deltas`) is applied to a copy of its parent's
file, and the result must have the published checksum. An adapter is merged while it is loaded, into the weights that the server was started
with. Therefore, requests do not refer to an adapter, and decoding costs the same as without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.records import ADAPTER
from agentrl.version import deltas
from agentrl.version.adapters import Adapter, read_adapter, read_tensors
from agentrl.version.weight_files import WeightCopy, check_same_shapes, checked_weight_paths, tensor_shapes

EMBEDDING = ".embed_tokens.weight"  # in a text model: model.embed_tokens.weight
LM_HEAD = "lm_head.weight"


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM's types are not followed
    """The folder from which versions may be loaded. The folder is set once, after the server has started."""

    versions_folder: str


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One version: its folder and the byte size of each of its safetensors files."""

    folder: str
    files: dict[str, int]


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):  # type: ignore[misc]
    """Loads versions from files: complete models, deltas, or adapters for the first version. One `update_weights` call loads one
    version."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._versions_folder: Path | None = None
        self._copy = WeightCopy()
        self._tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        self._first_folder = Path(self.model_config.model).resolve()  # the folder with which the server was started
        self._first_paths = sorted(self._first_folder.glob("*.safetensors"))
        self._shapes = self._untied(tensor_shapes(self._first_paths))

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Sets the versions folder. Raises `ValueError` if a different folder has been set."""
        folder = Path(init_info.versions_folder).resolve()
        if self._versions_folder not in (None, folder):
            raise ValueError(f"versions folder is already set to {self._versions_folder}")
        self._versions_folder = folder

    def start_weight_update(self) -> None:
        """Does nothing, because `receive_weights` starts the reload after it has checked the files."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Checks and loads one version. Raises `ValueError` if the version is rejected; the old weights are then still loaded."""
        if self._versions_folder is None:
            raise RuntimeError("the versions folder was never set: call init_transfer_engine first")
        folder = Path(update_info.folder)
        paths = checked_weight_paths(folder, update_info.files, below=self._versions_folder, first_folder=self._first_folder)
        adapter = None
        if [path.name for path in paths] == [ADAPTER]:
            adapter, paths = read_adapter(paths[0], self._shapes), self._first_paths
        elif [path.name for path in paths] == [deltas.DELTA_FILE]:
            paths = [self._copy.apply_delta(folder)]
        check_same_shapes(self._shapes, self._untied(tensor_shapes(paths)))
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(self._tensors(paths, adapter))
        finally:
            # Also after a failure: parameters that were not reached are restored to their old values, so the model can run.
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Does nothing: the model is complete after `receive_weights`."""

    def shutdown(self) -> None:
        """Deletes the copy that deltas are applied to."""
        self._copy.remove()

    def _untied(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in shapes.items() if not (self._tied and name == LM_HEAD)}

    def _tensors(self, paths: list[Path], adapter: Adapter | None) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = read_tensors(paths)
        for name, tensor in tensors if adapter is None else adapter.merge(tensors, self.device):
            if self._tied and name == LM_HEAD:
                continue
            yield name, tensor
            if self._tied and name.endswith(EMBEDDING):
                # vLLM's CPU kernels keep a packed copy of the output head, which stays stale unless the head is loaded by name.
                yield LM_HEAD, tensor

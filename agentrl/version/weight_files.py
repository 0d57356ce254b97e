"""Checks a version's weight files before a running model loads them, and applies deltas."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.base.files import sha256_file
from agentrl.base.scratch import ScratchFolder
from agentrl.version import deltas


def checked_weight_paths(folder: Path, sizes: Mapping[str, int], *, below: Path, first_folder: Path) -> list[Path]:
    """Returns the paths of the files in `folder` that `sizes` lists. Raises `ValueError` if a file is missing, incomplete or outside
    `folder`, if `sizes` is empty, or if `folder` is not allowed.

    `folder` must be below `below` (the run's versions folder) or be `first_folder`, with which the server started.
    """
    folder = folder.resolve()
    if folder != first_folder and (folder == below or not folder.is_relative_to(below)):
        raise ValueError(f"weights folder {folder} is not below the run's versions folder {below}")
    if not sizes:
        raise ValueError(f"no weight files listed for {folder}")
    paths = []
    for name, size in sizes.items():
        path = folder / name
        if Path(name).name != name or path.resolve().parent != folder:
            raise ValueError(f"weight file {name!r} is outside {folder}")
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"weight file {path} is missing or not {size} bytes long")
        paths.append(path)
    return paths


def tensor_shapes(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape for every tensor in the safetensors files. Raises `ValueError` if a file is not safetensors."""
    return {name: _shape(path, entry) for path in paths for name, entry in deltas.read_safetensors_header(path).items()}


def check_same_shapes(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ValueError` for the first tensor that is missing, unknown or of the wrong shape."""
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ValueError(f"tensor {name}: the served model has shape {expected.get(name)}, the new version {actual.get(name)}")


class WeightCopy:
    """The weights to which deltas are applied: a temporary file that the first delta creates and each delta changes in place."""

    def __init__(self) -> None:
        self._folder = ScratchFolder()
        self._path = self._folder.path / deltas.WEIGHTS
        self._sha256 = ""  # hash of the file; empty if the file is missing or may be incomplete

    def apply_delta(self, folder: Path) -> Path:
        """Returns the path of the complete weights of the delta version in `folder`. The file is valid until the next call.

        Raises `ValueError` if the delta is damaged, if neither the loaded weights nor the file of the delta's parent are the parent's
        weights, or if the result has the wrong checksum.
        """
        delta = deltas.read_delta(folder)
        if delta is None:
            raise ValueError(f"{folder} contains no delta")
        if self._sha256 != delta.parent_sha256:
            self._take(folder.parent / f"{delta.parent:06d}" / deltas.WEIGHTS, delta.parent_sha256)
        self._sha256, wanted = "", delta.sha256
        deltas.apply_delta(folder, self._path)
        self._sha256 = wanted
        return self._path

    def remove(self) -> None:
        """Deletes the file, after which no delta can be applied. Idempotent."""
        self._folder.remove()

    def _take(self, parent: Path, sha256: str) -> None:
        if not parent.is_file():
            raise ValueError(f"the loaded weights are not the delta's parent, and {parent} is missing")
        self._sha256 = ""
        shutil.copyfile(parent, self._path)
        if sha256_file(self._path) != sha256:
            raise ValueError(f"{parent} is not the delta's parent")


def _shape(path: Path, entry: Mapping[str, Any]) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{path} is not a safetensors file")
    return tuple(shape)

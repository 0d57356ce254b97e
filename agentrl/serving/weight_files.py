"""What a version's weight files must be before a running model lets them in. Standard library only."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

_HEADER_LIMIT = 100 * 2**20  # the format's own bound on its JSON header


def weight_paths(folder: Path, sizes: Mapping[str, int], *, below: Path, first_folder: Path) -> list[Path]:
    """The files `sizes` names in `folder`, each proven whole. Raises `ValueError`.

    `folder` must lie below `below` (the run's versions folder) or be `first_folder`, which the server was started with.
    """
    folder = folder.resolve()
    if folder != first_folder and (folder == below or not folder.is_relative_to(below)):
        raise ValueError(f"weights folder {folder} is not below the run's versions folder {below}")
    if not sizes:
        raise ValueError(f"no weight files named for {folder}")
    paths = []
    for name, size in sizes.items():
        path = folder / name
        if Path(name).name != name or path.resolve().parent != folder:
            raise ValueError(f"weight file {name!r} lies outside {folder}")
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"weight file {path} is missing or not {size} bytes long")
        paths.append(path)
    return paths


def tensor_shapes(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in some safetensors files, read from their headers alone.

    Raises `ValueError` when one is not safetensors (format: https://github.com/huggingface/safetensors#format).
    """
    return {name: shape for path in paths for name, shape in _header(path).items()}


def check_same_shapes(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ValueError` naming the first tensor that is missing, unknown or of another shape."""
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(f"tensor {name}: the served model has shape {expected.get(name)}, the new version {given.get(name)}")


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        text = file.read(length) if length <= _HEADER_LIMIT else b""
    try:
        header = json.loads(text)
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{path} is not a safetensors file") from None

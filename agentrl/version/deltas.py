"""Weights stored as a difference from the parent's weights. A version folder may contain a delta instead of `model.safetensors`.

    delta.json   `Delta`: the parent, and the checksums of both files and of the delta
    model.delta  for each CHUNK of the file: the length of a zstd frame (uint32, little-endian; 0 if nothing changed), then the frame.
                 It contains the bytes XORed with the parent's, grouped by significance: sign and exponent bytes rarely change, so
                 they form long runs of zeros

`materialize` restores the complete file if the chain of parents ends at a complete file. Every file is checked by its sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import zstandard

from agentrl.base.files import replace_file, sha256_file
from agentrl.records import WHOLE_MODEL, codec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WEIGHTS = WHOLE_MODEL
DELTA_FILE = "model.delta"
DELTA_RECORD = "delta.json"
NEWEST_WEIGHTS = ".newest.safetensors"  # in versions/: the last published weights, base of the next delta
CHUNK = 1 << 24
_LEVEL = 3
_HEADER_LIMIT = 100 << 20  # the safetensors format's own bound
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The record of a `model.delta`."""

    parent: int  # version
    parent_sha256: str  # hash of the parent's model.safetensors
    sha256: str  # hash of the resulting model.safetensors
    delta_sha256: str  # hash of model.delta
    size: int  # bytes of both model.safetensors
    stride: int  # bytes of a number


def write_delta(parent: Path, target: Path, folder: Path, *, number: int) -> Delta | None:
    """Writes `folder/model.delta` and `delta.json`, which turn the file `parent` (of version `number`) into `target`.

    Returns None and writes nothing if the files differ in length.
    """
    size = target.stat().st_size
    if parent.stat().st_size != size:
        return None
    stride = _stride(target)
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    before, after = hashlib.sha256(), hashlib.sha256()
    with parent.open("rb") as old, target.open("rb") as new, (folder / DELTA_FILE).open("wb") as out:
        while data := new.read(CHUNK):
            was = old.read(CHUNK)
            before.update(was)
            after.update(data)
            frame = b"" if was == data else packer.compress(_split(_array(was) ^ _array(data), stride).tobytes())
            out.write(struct.pack("<I", len(frame)))
            out.write(frame)
    delta = Delta(
        parent=number,
        parent_sha256=before.hexdigest(),
        sha256=after.hexdigest(),
        delta_sha256=sha256_file(folder / DELTA_FILE),
        size=size,
        stride=stride,
    )
    (folder / DELTA_RECORD).write_bytes(codec.to_json(delta))
    return delta


def read_delta(folder: Path) -> Delta | None:
    """Returns the record of the delta in a version folder; None if there is none. Raises `ValueError` if the record is damaged."""
    path = folder / DELTA_RECORD
    return codec.from_json(Delta, path.read_bytes()) if path.exists() else None


def apply_delta(folder: Path, file: Path) -> None:
    """Changes `file` in place from the parent's weights to those of the version in `folder`.

    Raises `ValueError` if the delta has no record or does not match its record or the size of `file` (`file` is unchanged), or if a chunk
    or the result is damaged (`file` is unusable).
    """
    delta = read_delta(folder)
    if delta is None:
        raise ValueError(f"{folder} contains no delta")
    if sha256_file(folder / DELTA_FILE) != delta.delta_sha256:
        raise ValueError(f"{folder / DELTA_FILE} is damaged: its sha256 differs")
    if file.stat().st_size != delta.size or delta.stride not in (1, 2, 4, 8):
        raise ValueError(f"{folder / DELTA_FILE} does not fit {file}, which must have {delta.size} bytes")
    digest, unpacker = hashlib.sha256(), zstandard.ZstdDecompressor()
    with (folder / DELTA_FILE).open("rb") as frames, file.open("r+b") as target:
        for start in range(0, delta.size, CHUNK):
            data = target.read(min(CHUNK, delta.size - start))
            frame = _frame(frames)
            if frame:
                try:
                    if zstandard.frame_content_size(frame) != len(data):  # before memory is allocated for it
                        raise ValueError(f"{folder / DELTA_FILE} is damaged: a chunk has the wrong length")
                    change = unpacker.decompress(frame)
                except zstandard.ZstdError as error:
                    raise ValueError(f"{folder / DELTA_FILE} is damaged: {error}") from error
                data = (_array(data) ^ _join(_array(change), delta.stride)).tobytes()
                target.seek(start)
                target.write(data)
            digest.update(data)
    if digest.hexdigest() != delta.sha256:
        raise ValueError(f"{file} with {folder / DELTA_FILE} is not the published version: its sha256 differs")


def delta_chain(folder: Path) -> list[Path]:
    """Returns the version folders from the nearest complete version to `folder`. Raises `ValueError` if the chain is broken."""
    links = [folder]
    while not (links[0] / WEIGHTS).exists():
        delta = read_delta(links[0])
        if delta is None:
            raise ValueError(f"{links[0]} contains neither {WEIGHTS} nor a delta")
        if delta.parent >= int(links[0].name):
            raise ValueError(f"{links[0] / DELTA_RECORD} has a parent that is not older")
        links.insert(0, links[0].parent / f"{delta.parent:06d}")
    return links


def materialize(folder: Path) -> Path:
    """Returns `folder/model.safetensors`. If the file is missing, builds it atomically from the version's delta. If there is no delta
    either, returns the path of the missing file.

    Raises `ValueError` if a delta in the chain is missing or damaged, or if the file cannot be written.
    """
    whole = folder / WEIGHTS
    delta = None if whole.exists() else read_delta(folder)
    if delta is None:
        return whole
    try:
        with replace_file(whole, tag=f"{os.getpid()}-{threading.get_ident()}") as part:
            newest = folder.parent / NEWEST_WEIGHTS
            if newest.exists() and newest.stat().st_size == delta.size:
                shutil.copyfile(newest, part)
            if not part.exists() or sha256_file(part) != delta.sha256:
                _build(delta_chain(folder), part)
    except OSError as error:
        raise ValueError(f"{whole} cannot be built from its delta: {error}") from error
    return whole


def verify_weights(folder: Path, sha256: str) -> None:
    """Raises `ValueError` unless the weights in `folder`, complete or as a chain of deltas, have this checksum, and `OSError` if a file
    cannot be read. Writes nothing."""
    links = delta_chain(folder)
    for link in reversed(links[1:]):
        delta = read_delta(link)
        assert delta is not None, "every link after the first is a delta"
        if delta.sha256 != sha256 or sha256_file(link / DELTA_FILE) != delta.delta_sha256:
            raise ValueError(f"{link / DELTA_FILE} differs from the registered file (sha256)")
        sha256 = delta.parent_sha256
    if (actual := sha256_file(links[0] / WEIGHTS)) != sha256:
        raise ValueError(f"{links[0] / WEIGHTS} differs from the registered file: sha256 {actual[:12]}..., expected {sha256[:12]}...")


def base_folders(folder: Path) -> list[Path]:
    """Returns the version folders from which the weights of `folder` are built; empty if the chain is broken."""
    try:
        return delta_chain(folder)[:-1]
    except (ValueError, OSError):
        return []


def write_complete(folder: Path, target: Path) -> None:
    """Writes the complete weights of the version in `folder` to the file `target`. Raises `ValueError` if a delta is missing or damaged, or
    if a file cannot be read or written."""
    try:
        _build(delta_chain(folder), target)
    except OSError as error:
        raise ValueError(f"the weights of {folder} cannot be built: {error}") from error


def _build(links: list[Path], target: Path) -> None:
    shutil.copyfile(links[0] / WEIGHTS, target)
    for link in links[1:]:
        apply_delta(link, target)


def _stride(path: Path) -> int:
    """Returns the size in bytes of a number in the most common dtype of a safetensors file; 1 if the dtype is unknown."""
    sizes: Counter[int] = Counter()
    try:
        for entry in read_safetensors_header(path).values():
            start, end = entry["data_offsets"]
            sizes[_SIZES.get(entry["dtype"], 1)] += int(end) - int(start)
    except (ValueError, KeyError, TypeError, OverflowError):
        return 1
    return sizes.most_common(1)[0][0] if sizes else 1


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Returns tensor name -> dtype, shape and data_offsets for each tensor in a safetensors file. The entries are not checked.

    Raises `ValueError` if the file is not a safetensors file (format: https://github.com/huggingface/safetensors#format).
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        text = file.read(length) if length <= _HEADER_LIMIT else b""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError(f"{path} is not a safetensors file")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _array(data: bytes) -> NDArray[np.uint8]:
    import numpy as np  # imported late: reading records needs no numpy

    return np.frombuffer(data, np.uint8)


def _split(data: NDArray[np.uint8], stride: int) -> NDArray[np.uint8]:
    """Returns the first bytes of all numbers, then all second bytes, and so on; a remainder stays at the end."""
    import numpy as np

    whole = len(data) - len(data) % stride
    return np.concatenate((data[:whole].reshape(-1, stride).T.reshape(-1), data[whole:]))


def _join(data: NDArray[np.uint8], stride: int) -> NDArray[np.uint8]:
    """Reverses `_split`."""
    import numpy as np

    whole = len(data) - len(data) % stride
    return np.concatenate((data[:whole].reshape(stride, -1).T.reshape(-1), data[whole:]))


def _frame(file: BinaryIO) -> bytes:
    prefix = file.read(4)
    length = struct.unpack("<I", prefix)[0] if len(prefix) == 4 else -1
    frame = file.read(length) if 0 <= length <= 2 * CHUNK + 1024 else b""
    if len(frame) != length:
        raise ValueError("a delta is truncated")
    return frame

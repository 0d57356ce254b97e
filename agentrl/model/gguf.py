"""Reads and checks the header of a GGUF file. No tensor is read, and every count is bounded.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Libraries that read such a file trust its counts and lengths.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn

from agentrl.errors import UserError

MAX_VALUES = 10_000  # metadata entries; real files have dozens
MAX_TENSORS = 100_000
MAX_ITEMS = 1 << 22  # items of an array, such as a vocabulary
MAX_KEY = 1 << 16  # bytes, as in the format
MAX_DIMENSIONS = 4  # as in ggml

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's letters
_AGAIN = "download or copy it again"

Value = str | int | float | bool
"""A metadata value. An array is represented by its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor's entry in the header."""

    name: str
    shape: tuple[int, ...]  # fastest-varying dimension first
    kind: int  # ggml's number for the storage type, such as 3 for Q4_1
    offset: int  # bytes from the start of the data

    @property
    def values(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """A checked header."""

    path: Path
    architecture: str
    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]
    data: int  # byte offset of the tensors' data in the file

    @property
    def values(self) -> int:
        """The number of elements in all tensors."""
        return sum(tensor.values for tensor in self.tensors)

    def text(self, key: str) -> str:
        """Returns the metadata string at `key`, or an empty string if there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""


def read_header(path: Path) -> GgufHeader:
    """Reads and checks a header. Raises `UserError` if the file is not GGUF, has an unsupported version, is truncated or damaged, or is not
    a model, and `OSError` if the file cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(24)
        if start[:4] != _MAGIC:
            what = "a Git LFS pointer (git lfs pull)" if start.startswith(b"version ") else "not a GGUF file"
            raise UserError(f"{path} is {what}", fix="give a GGUF file, a Hugging Face folder, or package:NAME")
        if len(start) < 24:
            _cut_off(path, size)
        version, tensors, values = struct.unpack("<IQQ", start[4:])
        if version not in _VERSIONS:
            raise UserError(
                f"{path} has GGUF version {version}, but only versions {_VERSIONS} are supported", fix="convert the model again"
            )
        if values > MAX_VALUES or tensors > MAX_TENSORS:
            _damaged(path, f"{values} values and {tensors} tensors are more than a model has")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).header(values, tensors)


class _Reader:
    """Reads a header from byte 24 on."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.at, self.size = path, content, 24, len(content)

    def header(self, values: int, tensors: int) -> GgufHeader:
        """Reads the metadata and the tensor entries."""
        metadata: dict[str, Value] = {}
        for _ in range(values):
            key = self.string(MAX_KEY)
            if key in metadata:
                _damaged(self.path, f"key {key[:80]!r} occurs twice")
            metadata[key] = self.value(*self.numbers("I"))
        entries = tuple(self.tensor() for _ in range(tensors))
        if len({tensor.name for tensor in entries}) < len(entries):
            _damaged(self.path, "two tensors have the same name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            _damaged(self.path, f"the alignment {alignment!r} is invalid")
        data = -(-self.at // alignment) * alignment
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            _damaged(self.path, "it has no general.architecture")
        return GgufHeader(path=self.path, architecture=architecture, metadata=metadata, tensors=entries, data=data)

    def numbers(self, letters: str) -> tuple[int, ...]:
        """Reads numbers in the `struct` format `letters`."""
        form = struct.Struct(f"<{letters}")
        at = self.take(form.size)
        return form.unpack_from(self.content, at)

    def take(self, count: int) -> int:
        """Skips `count` bytes, and returns their offset."""
        at, self.at = self.at, self.at + count
        if self.at > self.size:
            _cut_off(self.path, self.size)
        return at

    def string(self, most: int) -> str:
        """Reads a string of at most `most` bytes."""
        (length,) = self.numbers("Q")
        if length > most:
            _damaged(self.path, f"a string of {length} bytes is too long")
        at = self.take(length)
        try:
            return self.content[at : at + length].decode()
        except UnicodeDecodeError as error:
            _damaged(self.path, str(error))

    def value(self, kind: int) -> Value:
        """Reads a metadata value."""
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string(self.size)
        if kind != _ARRAY:
            _damaged(self.path, f"a value has the unknown type {kind}")
        inner, count = self.numbers("IQ")
        if count > MAX_ITEMS:
            _damaged(self.path, f"an array of {count} values is too long")
        if inner in _SCALARS:
            self.take(count * struct.calcsize(f"<{_SCALARS[inner]}"))
        elif inner == _STRING:
            for _ in range(count):
                self.take(*self.numbers("Q"))
        else:
            _damaged(self.path, f"an array has the unsupported type {inner}")
        return int(count)

    def tensor(self) -> GgufTensor:
        """Reads a tensor's entry."""
        name = self.string(MAX_KEY)
        (dimensions,) = self.numbers("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            _damaged(self.path, f"a tensor has {dimensions} dimensions")
        shape = self.numbers(f"{dimensions}Q")
        kind, offset = self.numbers("IQ")
        return GgufTensor(name=name, shape=shape, kind=kind, offset=offset)


def check_data(header: GgufHeader) -> dict[str, int]:
    """Checks that every tensor is within the file. Returns the number of tensors by storage type, such as {"Q4_1": 210, "F32": 61}.

    Needs the package `gguf`. Raises `UserError` if the file is truncated or damaged.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    size, kinds = header.path.stat().st_size, dict[str, int]()
    for tensor in header.tensors:
        try:
            kind = GGMLQuantizationType(tensor.kind)
        except ValueError:
            _damaged(header.path, f"tensor {tensor.name[:80]!r} has the unknown storage type {tensor.kind}")
        block, width = GGML_QUANT_SIZES[kind]
        if tensor.values < 1 or tensor.shape[0] % block:
            _damaged(header.path, f"tensor {tensor.name[:80]!r} has the invalid shape {tensor.shape}")
        if (end := header.data + tensor.offset + tensor.values // block * width) > size:
            raise UserError(f"{header.path} is truncated: it has {size} bytes, but tensor {tensor.name[:80]!r} ends at {end}", fix=_AGAIN)
        kinds[kind.name] = kinds.get(kind.name, 0) + 1
    return kinds


def _cut_off(path: Path, size: int) -> NoReturn:
    raise UserError(f"{path} is truncated: it has only {size} bytes", fix=_AGAIN)


def _damaged(path: Path, what: str) -> NoReturn:
    raise UserError(f"{path} is damaged: {what}", fix=_AGAIN)

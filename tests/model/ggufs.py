"""GGUF files written byte by byte, so that any of their counts can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

STRING, ARRAY, UINT32 = 8, 9, 4
LLAMA: dict[str, str | int] = {"general.architecture": "llama", "llama.block_count": 1}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(content: str | int | Sequence[str]) -> bytes:
    if isinstance(content, str):
        return struct.pack("<I", STRING) + text(content)
    if isinstance(content, int):
        return struct.pack("<II", UINT32, content)
    return struct.pack("<IIQ", ARRAY, STRING, len(content)) + b"".join(map(text, content))


def tensor(name: str, shape: Sequence[int] = (4, 2), *, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    metadata: Mapping[str, str | int | Sequence[str]] = LLAMA,
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    value_count: int | None = None,
) -> bytes:
    counts = (len(tensors) if tensor_count is None else tensor_count, len(metadata) if value_count is None else value_count)
    values = b"".join(text(key) + value(content) for key, content in metadata.items())
    return magic + struct.pack("<IQQ", version, *counts) + values + b"".join(tensors)


def write(path: Path, content: bytes, *, data: int = 0) -> Path:
    """Writes a file of a header and `data` zero bytes after it."""
    path.write_bytes(content + bytes(-len(content) % 32) + bytes(data))
    return path

"""The files of a version: a delta and its record, the header of a safetensors file, an adapter. A damaged one is a `ValueError`."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import zstandard

from agentrl import codec, deltas
from agentrl.deltas import Delta
from agentrl.fuzzing import mutators
from agentrl.fuzzing.mutators import join, split
from agentrl.fuzzing.target import Check, Target, must, one_in
from agentrl.records import ADAPTER, WHOLE_MODEL
from agentrl.serving.weight_files import check_same_shapes, tensor_shapes, weight_paths

_NUMBERS = 64
WRITTEN_EVERY = 4
"""Of so many model files one is made a delta of too."""


def _model(numbers: bytes) -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [len(numbers) // 4], "data_offsets": [0, len(numbers)]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


PARENT, CHILD = _model(bytes(4 * _NUMBERS)), _model(bytes(range(256))[: 4 * _NUMBERS])


def prepare(scratch: Path) -> Check:
    parent, child = scratch / "000000", scratch / "000001"
    for folder in (parent, child):
        folder.mkdir()
    (parent / WHOLE_MODEL).write_bytes(PARENT)
    (scratch / WHOLE_MODEL).write_bytes(CHILD)
    delta = deltas.encode(parent / WHOLE_MODEL, scratch / WHOLE_MODEL, child, number=0)
    assert delta is not None, "files of one length"
    frames = (child / deltas.FRAMES).read_bytes()

    def check(data: bytes) -> None:
        label, body = split(data)
        if label == deltas.FRAMES:
            _frames(child, delta, body)
        elif label == deltas.RECORD:
            (child / deltas.FRAMES).write_bytes(frames)
            _made(child, body)
        elif label in (WHOLE_MODEL, ADAPTER):
            _header(scratch / label, body)

    return check


def _frames(folder: Path, delta: Delta, frames: bytes) -> None:
    """A delta that somebody has written on purpose: its record has the checksum of what it holds."""
    (folder / deltas.FRAMES).write_bytes(frames)
    hostile = Delta(
        parent=delta.parent,
        parent_sha256=delta.parent_sha256,
        sha256=delta.sha256,
        delta_sha256=hashlib.sha256(frames).hexdigest(),
        size=delta.size,
        stride=delta.stride,
    )
    _made(folder, codec.to_json(hostile))


def _made(folder: Path, record: bytes) -> None:
    """A version is made whole, and then it is the one that was published, or it is refused and nothing is left of it."""
    (folder / deltas.RECORD).write_bytes(record)
    whole = folder / WHOLE_MODEL
    try:
        deltas.materialize(folder)
        must(deltas.sha256_of(whole) == codec.from_json(Delta, record).sha256, "a version that was not published")
    except ValueError:
        must(not whole.exists(), "a version that was refused lies there")
    finally:
        whole.unlink(missing_ok=True)
        deltas.needed_by(folder)
    must(not [path for path in folder.iterdir() if path.name not in (deltas.RECORD, deltas.FRAMES)], "something is left over")


def _header(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        must(
            weight_paths(path.parent, {path.name: len(data)}, below=path.parent.parent, first_folder=path.parent) == [path], "another file"
        )
        shapes = tensor_shapes([path])
        check_same_shapes(shapes, shapes)
    except ValueError:
        pass
    if not one_in(WRITTEN_EVERY, data):
        return
    deltas.encode(path, path, path.parent, number=0)
    must((delta := deltas.read(path.parent)) is not None and delta.stride in (1, 2, 4, 8), "numbers of no size")
    (path.parent / deltas.RECORD).unlink()
    (path.parent / deltas.FRAMES).unlink()


def seeds() -> Sequence[bytes]:
    packed = zstandard.ZstdCompressor().compress(bytes(len(CHILD)))
    adapter = {
        "base_model.model.a.lora_A.weight": {"dtype": "F16", "shape": [1, 2], "data_offsets": [0, 4]},
        "__metadata__": {"scaling": "2.0"},
    }
    text = json.dumps(adapter).encode()
    record = Delta(parent=0, parent_sha256="0" * 64, sha256="1" * 64, delta_sha256="2" * 64, size=len(CHILD), stride=4)
    return [
        *(join(WHOLE_MODEL, one) for one in (PARENT, CHILD, b"", PARENT[:20])),
        join(ADAPTER, struct.pack("<Q", len(text)) + text + bytes(4)),
        *(join(deltas.FRAMES, one) for one in (struct.pack("<I", len(packed)) + packed, struct.pack("<I", 0), b"")),
        join(deltas.RECORD, codec.to_json(record)),
    ]


target = Target(
    name="weights",
    about="deltas and safetensors files of a version",
    prepare=prepare,
    seeds=seeds,
    mutate=mutators.labelled(
        {WHOLE_MODEL: mutators.safetensors, ADAPTER: mutators.safetensors, deltas.FRAMES: None, deltas.RECORD: mutators.json_text}
    ),
    words=(
        b"\x28\xb5\x2f\xfd",
        b'"data_offsets"',
        b'"shape"',
        b'"dtype"',
        b'"BF16"',
        b'"stride"',
        b'"parent"',
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
    ),
)

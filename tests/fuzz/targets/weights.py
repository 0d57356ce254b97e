"""Files with weights: a version's delta and its record, safetensors headers, an adapter, the folder of a user's own model, a GGUF file.

A damaged one is a `ValueError`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import zstandard

from agentrl.base.files import sha256_file
from agentrl.config.recipe import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import UserError
from agentrl.model.gguf import read_header
from agentrl.records import ADAPTER, WHOLE_MODEL, codec
from agentrl.version import deltas
from agentrl.version.deltas import Delta
from agentrl.version.model_folder import check_model, check_model_files
from agentrl.version.weight_files import check_same_shapes, checked_weight_paths, tensor_shapes
from tests.fuzz import mutators
from tests.fuzz.mutators import join, split
from tests.fuzz.target import Check, Target, must, one_in

GGUF = "model.gguf"
_NUMBERS = 64
WRITTEN_EVERY = 4
"""One of this many model files is also turned into a delta."""


def _gguf_file() -> bytes:
    """A header with a text, a number, an array of texts and two tensors."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    values = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"llama.block_count") + struct.pack("<II", 4, 1),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b"),
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.0, 1.0),
    ]
    tensors = [text(name) + struct.pack("<IQQIQ", 2, 32, 2, 0, at) for at, name in ((0, b"token_embd.weight"), (256, b"output.weight"))]
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join((*values, *tensors))


def _model(numbers: bytes) -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [len(numbers) // 4], "data_offsets": [0, len(numbers)]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


PARENT, CHILD = _model(bytes(4 * _NUMBERS)), _model(bytes(range(256))[: 4 * _NUMBERS])


_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 8,
    "rope_scaling": None,
    "layer_types": ["full_attention"],
    "text_config": {"num_attention_heads": 2, "rope_parameters": {"factor": 2.0}, "vocab_size": 8},
    "quantization_config": None,
    "logit_scale": 1.0,
}
_TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<|im_end|>"}]}
MODEL: Mapping[str, bytes] = {
    "config.json": json.dumps(_CONFIG).encode(),
    "tokenizer.json": json.dumps(_TOKENIZER).encode(),
    "tokenizer_config.json": b'{"chat_template": "{{ messages }}", "eos_token": "<|im_end|>"}',
    "model.safetensors.index.json": b'{"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}',
    "model-00001-of-00001.safetensors": PARENT,
}
"""The files of a model folder: path -> content."""
RECIPE = Recipe(name="fuzz", policy=PolicyConfig(model="-"), tasks=TasksConfig(family="sandboxes.tables:Tables"))


def prepare(scratch: Path) -> Check:
    parent, child = scratch / "000000", scratch / "000001"
    for folder in (parent, child):
        folder.mkdir()
    (parent / WHOLE_MODEL).write_bytes(PARENT)
    (scratch / WHOLE_MODEL).write_bytes(CHILD)
    delta = deltas.write_delta(parent / WHOLE_MODEL, scratch / WHOLE_MODEL, child, number=0)
    assert delta is not None, "files of one length"
    frames = (child / deltas.DELTA_FILE).read_bytes()
    model = scratch / "model"
    model.mkdir()
    for name, content in MODEL.items():
        (model / name).write_bytes(content)

    def check(data: bytes) -> None:
        label, body = split(data)
        if label == deltas.DELTA_FILE:
            _frames(child, delta, body)
        elif label == deltas.DELTA_RECORD:
            (child / deltas.DELTA_FILE).write_bytes(frames)
            _check_materialized(child, body)
        elif label in (WHOLE_MODEL, ADAPTER):
            _header(scratch / label, body)
        elif label in MODEL:
            _model_folder(model, label, body)
        elif label == GGUF:
            _gguf(scratch / GGUF, body)

    return check


def _gguf(path: Path, data: bytes) -> None:
    """An accepted header has as many tensors and values as it declares, and they fit in the file."""
    path.write_bytes(data)
    try:
        header = read_header(path)
    except UserError:
        return
    counts = struct.unpack("<QQ", data[8:24])
    must((len(header.tensors), len(header.metadata)) == counts, "counts differ from those in the file")
    must(len(data) >= 24 + 13 * counts[1] + 32 * counts[0], "more than fits in the file")


def _frames(folder: Path, delta: Delta, frames: bytes) -> None:
    """A forged delta whose record has the checksum of its content."""
    (folder / deltas.DELTA_FILE).write_bytes(frames)
    hostile = Delta(
        parent=delta.parent,
        parent_sha256=delta.parent_sha256,
        sha256=delta.sha256,
        delta_sha256=hashlib.sha256(frames).hexdigest(),
        size=delta.size,
        stride=delta.stride,
    )
    _check_materialized(folder, codec.to_json(hostile))


def _check_materialized(folder: Path, record: bytes) -> None:
    """A materialized version equals the published one; a refused version leaves no file."""
    (folder / deltas.DELTA_RECORD).write_bytes(record)
    weights_file = folder / WHOLE_MODEL
    try:
        deltas.materialize(folder)
        must(sha256_file(weights_file) == codec.from_json(Delta, record).sha256, "a version that was never published")
    except ValueError:
        must(not weights_file.exists(), "a refused version was written")
    finally:
        weights_file.unlink(missing_ok=True)
        deltas.base_folders(folder)
    must(not [path for path in folder.iterdir() if path.name not in (deltas.DELTA_RECORD, deltas.DELTA_FILE)], "a file is left over")


def _header(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        must(
            checked_weight_paths(path.parent, {path.name: len(data)}, below=path.parent.parent, first_folder=path.parent) == [path],
            "another file",
        )
        shapes = tensor_shapes([path])
        check_same_shapes(shapes, shapes)
    except ValueError:
        pass
    if not one_in(WRITTEN_EVERY, data):
        return
    deltas.write_delta(path, path, path.parent, number=0)
    must((delta := deltas.read_delta(path.parent)) is not None and delta.stride in (1, 2, 4, 8), "numbers of no size")
    (path.parent / deltas.DELTA_RECORD).unlink()
    (path.parent / deltas.DELTA_FILE).unlink()


def _model_folder(folder: Path, name: str, data: bytes) -> None:
    """A user's model with one wrong file: it is accepted, or the mistake is reported."""
    (folder / name).write_bytes(data)
    try:
        check_model_files(folder)
        check_model(folder, RECIPE)
    except UserError as error:
        must(bool(error.message and error.fix), "an error without a message")
    finally:
        (folder / name).write_bytes(MODEL[name])


def seeds() -> Sequence[bytes]:
    packed = zstandard.ZstdCompressor().compress(bytes(len(CHILD)))
    adapter = {
        "base_model.model.a.lora_A.weight": {"dtype": "F16", "shape": [1, 2], "data_offsets": [0, 4]},
        "__metadata__": {"scaling": "2.0"},
    }
    text = json.dumps(adapter).encode()
    record = Delta(parent=0, parent_sha256="0" * 64, sha256="1" * 64, delta_sha256="2" * 64, size=len(CHILD), stride=4)
    return [
        *(join(WHOLE_MODEL, content) for content in (PARENT, CHILD, b"", PARENT[:20])),
        join(ADAPTER, struct.pack("<Q", len(text)) + text + bytes(4)),
        *(join(deltas.DELTA_FILE, content) for content in (struct.pack("<I", len(packed)) + packed, struct.pack("<I", 0), b"")),
        join(deltas.DELTA_RECORD, codec.to_json(record)),
        join(GGUF, _gguf_file()),
        *(join(name, content) for name, content in MODEL.items()),
    ]


_MODEL_MUTATORS = {name: mutators.json_text if name.endswith(".json") else mutators.safetensors for name in MODEL}

target = Target(
    name="weights",
    about="deltas and safetensors files of a version; the files of a model folder; the header of a GGUF file",
    prepare=prepare,
    seeds=seeds,
    mutate=mutators.labelled(
        {
            WHOLE_MODEL: mutators.safetensors,
            ADAPTER: mutators.safetensors,
            deltas.DELTA_FILE: None,
            GGUF: None,
            deltas.DELTA_RECORD: mutators.json_text,
            **_MODEL_MUTATORS,
        }
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

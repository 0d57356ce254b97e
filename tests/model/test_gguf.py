from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from agentrl.model.gguf import check_data, read_header
from tests.model import ggufs

SOUND = ggufs.header({**ggufs.LLAMA, "tokenizer.ggml.tokens": ["a", "é"]}, [ggufs.tensor("a"), ggufs.tensor("b", (32,), kind=3, offset=32)])


def test_a_header_is_read_without_its_arrays(tmp_path: Path) -> None:
    header = read_header(ggufs.write(tmp_path / "m.gguf", SOUND, data=64))
    assert header.architecture == "llama"
    assert header.metadata == {**ggufs.LLAMA, "tokenizer.ggml.tokens": 2}
    assert [(tensor.name, tensor.shape, tensor.values) for tensor in header.tensors] == [("a", (4, 2), 8), ("b", (32,), 32)]
    assert header.values == 40 and header.data % 32 == 0


KEY = struct.pack("<Q", 1) + b"k"
HUGE = 1 << 60
HOSTILE = {
    "no GGUF": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "another version": (ggufs.header(version=1), "version 1"),
    "the other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "many values": (ggufs.header(value_count=HUGE), "more than a model has"),
    "many tensors": (ggufs.header(tensor_count=HUGE), "more than a model has"),
    "fewer values than it says": (ggufs.header(value_count=3), "truncated"),
    "fewer tensors than it says": (ggufs.header(tensor_count=3), "truncated"),
    "a long key": (ggufs.header({}, value_count=1) + struct.pack("<Q", HUGE), "damaged: a string of"),
    "a long text": (ggufs.header({}, value_count=1) + KEY + struct.pack("<IQ", ggufs.STRING, HUGE), "damaged: a string of"),
    "a long array": (ggufs.header({}, value_count=1) + KEY + struct.pack("<IIQ", ggufs.ARRAY, 4, HUGE), "an array of"),
    "an array that does not end": (ggufs.header({}, value_count=1) + KEY + struct.pack("<IIQ", ggufs.ARRAY, 4, 1 << 20), "truncated"),
    "texts that do not end": (ggufs.header({}, value_count=1) + KEY + struct.pack("<IIQ", ggufs.ARRAY, 8, 1 << 20), "truncated"),
    "an array of arrays": (
        ggufs.header({}, value_count=1) + KEY + struct.pack("<IIQ", ggufs.ARRAY, 9, 1),
        "an array has the unsupported type 9",
    ),
    "an unknown type": (ggufs.header({}, value_count=1) + KEY + struct.pack("<I", 77), "unknown type 77"),
    "no text": (ggufs.header({}, value_count=1) + struct.pack("<Q", 1) + b"\xff", "damaged"),
    "a key twice": (ggufs.header(value_count=3) + ggufs.text("general.architecture") + ggufs.value("x"), "occurs twice"),
    "a tensor twice": (ggufs.header(tensors=[ggufs.tensor("a"), ggufs.tensor("a")]), "the same name"),
    "many dimensions": (ggufs.header(tensors=[ggufs.tensor("a", (1,) * 5)]), "5 dimensions"),
    "an odd alignment": (ggufs.header({**ggufs.LLAMA, "general.alignment": 3}), "the alignment 3 is invalid"),
    "no alignment": (ggufs.header({**ggufs.LLAMA, "general.alignment": 0}), "the alignment 0 is invalid"),
    "no architecture": (ggufs.header({}), "has no general.architecture"),
    "nothing": (b"GGUF", "truncated"),
    "an empty file": (b"", "not a GGUF file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_raises_with_its_reason(name: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read_header(path)


@given(st.integers(0, len(SOUND) - 1))
def test_a_header_truncated_anywhere_raises(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(SOUND[:length])
    with pytest.raises(UserError, match=r"truncated|not a GGUF file"):
        read_header(path)


@given(st.integers(24, len(SOUND) - 1), st.binary(min_size=1, max_size=12))
def test_a_header_with_random_bytes_is_read_or_raises(tmp_path_factory: pytest.TempPathFactory, at: int, random_bytes: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "wrong.gguf"
    path.write_bytes((SOUND[:at] + random_bytes + SOUND[at + len(random_bytes) :])[: len(SOUND)])
    try:
        header = read_header(path)
    except UserError:
        return
    assert header.data <= len(SOUND) + (1 << 20) and header.architecture


@pytest.mark.models
def test_a_tensor_beyond_the_end_of_the_file_raises(tmp_path: Path) -> None:
    assert check_data(read_header(ggufs.write(tmp_path / "m.gguf", SOUND, data=32 + 20))) == {"F32": 1, "Q4_1": 1}
    with pytest.raises(UserError, match=r"is truncated: .* tensor 'b' ends at"):
        check_data(read_header(ggufs.write(tmp_path / "cut.gguf", SOUND, data=32 + 19)))


@pytest.mark.models
@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (ggufs.tensor("a", (1 << 62, 1 << 62)), "truncated"),
        (ggufs.tensor("a", (0, 4)), "has the invalid shape"),
        (ggufs.tensor("a", (33,), kind=3), "has the invalid shape"),
        (ggufs.tensor("a", kind=255), "unknown storage type 255"),
        (ggufs.tensor("a", offset=1 << 63), "truncated"),
    ],
)
def test_an_impossible_tensor_raises(tensor: bytes, reason: str, tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "m.gguf", ggufs.header(tensors=[tensor]), data=4096)
    with pytest.raises(UserError, match=reason):
        check_data(read_header(path))

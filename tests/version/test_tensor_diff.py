"""The change of every tensor, against float64 norms of the whole tensors."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from agentrl.records import ADAPTER, WHOLE_MODEL
from agentrl.version import deltas, tensor_diff
from agentrl.version.tensor_diff import compare_weights
from tests.strategies import examples


def write(folder: Path, tensors: dict[str, np.ndarray], name: str = WHOLE_MODEL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name, {"format": "pt"})
    return folder


def write_bfloat16(folder: Path, values: np.ndarray) -> np.ndarray:
    """Writes the upper halves of float32 numbers, and returns the numbers that they stand for."""
    halves = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [values.size], "data_offsets": [0, 2 * values.size]}}).encode()
    folder.mkdir()
    (folder / WHOLE_MODEL).write_bytes(len(header).to_bytes(8, "little") + header + halves.tobytes())
    return (halves.astype("<u4") << 16).view("<f4").astype(np.float64)


@settings(max_examples=examples(30), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), dtype=st.sampled_from(["<f2", "<f4", "<f8", "<i8"]), seed=st.integers(0, 99)
)
def test_norms_equal_those_of_whole_tensors_for_any_block(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], dtype: str, seed: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("any"), np.random.default_rng(seed)
    old = {f"t{index}": rng.normal(scale=9, size=size).astype(dtype) for index, size in enumerate(sizes)}
    new = {name: np.where(rng.random(values.shape) < 0.3, values + 1, values).astype(dtype) for name, values in old.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_diff, "BLOCK", 7)
        changes = {change.name: change for change in compare_weights(write(folder / "a", old), write(folder / "b", new))}
    assert changes.keys() == old.keys()
    for name, change in changes.items():
        before, after = old[name].astype(np.float64), new[name].astype(np.float64)
        assert (change.numbers, change.changed) == (before.size, np.count_nonzero(after != before))
        norms = [np.linalg.norm(values) for values in (before, after, after - before)]
        assert [change.before, change.after, change.difference] == pytest.approx(norms)
        assert change.largest == pytest.approx(np.abs(after - before).max(initial=0))


def test_bfloat16_deltas_and_adapters_are_compared(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3e5, 1e-4])
    before, after = write_bfloat16(tmp_path / "a", values), write_bfloat16(tmp_path / "b", values * 1.1)
    (change,) = compare_weights(tmp_path / "a", tmp_path / "b")
    assert change.difference == pytest.approx(np.linalg.norm(after - before)) and change.changed == 4

    model, versions = {"w": np.arange(9, dtype="<f4")}, tmp_path / "versions"
    write(versions / "000000", model)
    write(tmp_path / "complete", {"w": model["w"] + np.eye(1, 9, 3, dtype="<f4")[0]})
    (versions / "000001").mkdir()
    assert deltas.write_delta(versions / "000000" / WHOLE_MODEL, tmp_path / "complete" / WHOLE_MODEL, versions / "000001", number=0)
    (change,) = compare_weights(versions / "000000", versions / "000001")
    assert (change.changed, change.largest) == (1, 1.0)
    assert not (versions / "000001" / WHOLE_MODEL).exists(), "a comparison leaves no weights behind"

    adapter = write(versions / "000002", {"lora_A": np.full(4, 2, "<f4")}, ADAPTER)
    (change,) = compare_weights(versions / "000000", adapter)
    assert (change.before, change.after, change.relative) == (0, 4.0, math.inf), "version 0 has an adapter of zeros"


def test_weights_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "a", {"w": np.array([1.0, 2.0])})
    write(tmp_path / "b", {"w": np.array([math.nan, 2.0])})
    (change,) = compare_weights(tmp_path / "a", tmp_path / "b")
    assert change.changed == 1 and math.isnan(change.difference) and math.isnan(change.after)


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}, "offsets outside the file"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}, "offsets outside the file"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": "0, 8"}}, "no valid offsets"),
        ({"w": {"dtype": "__import__", "shape": [4], "data_offsets": [0, 8]}}, "can be compared"),
        ({"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "exists only in"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "elements in"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, header: dict[str, object], error: str) -> None:
    write(tmp_path / "a", {"w": np.zeros(2, "<f4")})
    text = json.dumps(header).encode()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / WHOLE_MODEL).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=error):
        list(compare_weights(tmp_path / "a", tmp_path / "b"))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a", {"w": np.zeros(2, "<f4")})
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="neither"):
        list(compare_weights(tmp_path / "a", tmp_path / "b"))


def test_a_large_tensor_needs_the_memory_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_diff, "BLOCK", 1 << 14)
    for name in ("a", "b"):
        write(tmp_path / name, {"w": np.full(1 << 20, ord(name), "<f4")})  # 4 MiB each
    tracemalloc.start()
    (change,) = compare_weights(tmp_path / "a", tmp_path / "b")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert change.changed == 1 << 20 and peak < 2 << 20

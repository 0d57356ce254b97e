"""Deltas restore the same bytes or raise an error; they never give other weights."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from agentrl.base.files import sha256_file
from agentrl.config import SamplingConfig
from agentrl.errors import StoreError
from agentrl.records import PolicyVersion, VersionState
from agentrl.session.models import SAMPLING_FILE, copy_base_version, export_model, find_model
from agentrl.version import FolderRegistry, deltas
from agentrl.version.weight_files import WeightCopy
from tests.strategies import examples


def weights(path: Path, seed: int, *, changed: float = 0.05, dtype: type = np.float32) -> None:
    """Writes weights of which a fraction `changed` depends on the seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    base = np.random.default_rng(0).normal(size=(64, 33)).astype(dtype)
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(base.shape) < changed, base + rng.normal(size=base.shape).astype(dtype) / 1000, base)
    save_file({"a": values.astype(dtype), "b": np.arange(7, dtype=np.int64)}, path, {"format": "pt"})


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    """Version 0 as a full model and versions 1 to 3 as deltas of the previous one, as the learner writes them."""
    folder = tmp_path / "versions"
    weights(folder / "000000" / deltas.WEIGHTS, 0)
    for number in (1, 2, 3):
        weights(tmp_path / "whole" / str(number), number)
        home = folder / f"{number:06d}"
        home.mkdir()
        before = folder / "000000" / deltas.WEIGHTS if number == 1 else tmp_path / "whole" / str(number - 1)
        assert deltas.write_delta(before, tmp_path / "whole" / str(number), home, number=number - 1) is not None
    return folder


def full_weights(versions: Path, number: int) -> bytes:
    return (versions.parent / "whole" / str(number)).read_bytes()


def sha(versions: Path, number: int) -> str:
    return hashlib.sha256(full_weights(versions, number)).hexdigest()


@settings(max_examples=examples(60))
@given(data=st.data(), size=st.integers(0, 300), stride=st.sampled_from([1, 2, 4, 8]), chunk=st.sampled_from([7, 64, 300]))
def test_any_bytes_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, stride: int, chunk: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    old, new = (data.draw(st.binary(min_size=size, max_size=size)) for _ in range(2))
    (folder / "old").write_bytes(old)
    (folder / "new").write_bytes(new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "CHUNK", chunk)
        patch.setattr(deltas, "_stride", lambda _: stride)
        delta = deltas.write_delta(folder / "old", folder / "new", folder, number=4)
        assert delta is not None and (delta.size, delta.stride, delta.parent) == (size, stride, 4)
        deltas.apply_delta(folder, folder / "old")
    assert (folder / "old").read_bytes() == new


def test_a_files_dtype_determines_the_stride(tmp_path: Path) -> None:
    for dtype, stride in ((np.float32, 4), (np.float16, 2), (np.float64, 8)):
        weights(tmp_path / "w", 0, dtype=dtype)
        assert deltas._stride(tmp_path / "w") == stride
    (tmp_path / "w").write_bytes(b"\xff" * 40)
    assert deltas._stride(tmp_path / "w") == 1


def test_files_of_different_lengths_have_no_delta(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"12")
    assert deltas.write_delta(tmp_path / "a", tmp_path / "b", tmp_path, number=0) is None
    assert not (tmp_path / deltas.DELTA_FILE).exists() and deltas.read_delta(tmp_path) is None


def test_a_delta_of_few_changes_is_small(versions: Path) -> None:
    for number in (1, 2, 3):
        assert (versions / f"{number:06d}" / deltas.DELTA_FILE).stat().st_size < 0.25 * len(full_weights(versions, number))


def test_a_chain_is_materialized(versions: Path) -> None:
    weights_file = deltas.materialize(versions / "000003")
    assert weights_file.read_bytes() == full_weights(versions, 3)
    deltas.verify_weights(versions / "000002", sha(versions, 2))
    assert [path.name for path in deltas.delta_chain(versions / "000002")] == ["000000", "000001", "000002"]
    shutil.rmtree(versions / "000001")
    assert deltas.materialize(versions / "000003") == weights_file, "a materialized version does not need its parents"
    assert [path.name for path in deltas.delta_chain(versions / "000003")] == ["000003"]
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor a delta"):
        deltas.materialize(versions / "000002")
    assert sorted(path.name for path in (versions / "000002").iterdir()) == [deltas.DELTA_RECORD, deltas.DELTA_FILE]


def test_the_learners_copy_is_used_only_if_its_checksum_fits(versions: Path) -> None:
    shutil.rmtree(versions / "000001")
    (versions / deltas.NEWEST_WEIGHTS).write_bytes(b"x" * len(full_weights(versions, 3)))
    with pytest.raises(ValueError, match="neither"):
        deltas.materialize(versions / "000003")
    (versions / deltas.NEWEST_WEIGHTS).write_bytes(full_weights(versions, 3))
    assert deltas.materialize(versions / "000003").read_bytes() == full_weights(versions, 3)


@pytest.mark.parametrize("damage", ["frames", "cut", "parent", "record", "older"])
def test_damage_anywhere_raises(versions: Path, damage: str) -> None:
    frames, record = versions / "000002" / deltas.DELTA_FILE, versions / "000002" / deltas.DELTA_RECORD
    if damage == "frames":
        data = bytearray(frames.read_bytes())
        data[20] ^= 1
        frames.write_bytes(data)
    elif damage == "cut":
        frames.write_bytes(frames.read_bytes()[:-3])
    elif damage == "parent":
        weights(versions / "000000" / deltas.WEIGHTS, 99)
    else:
        fields = json.loads(record.read_text())
        fields |= {"sha256": "0" * 64} if damage == "record" else {"parent": 2}
        record.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"sha256 differs|differs from the registered file|not older"):
        deltas.verify_weights(versions / "000003", sha(versions, 3))
    with pytest.raises(ValueError, match=r"damaged|sha256 differs|not older"):
        deltas.materialize(versions / "000002")
    assert not (versions / "000002" / deltas.WEIGHTS).exists()


@pytest.mark.slow
def test_a_frames_size_is_bounded_by_the_file(versions: Path) -> None:
    """The record contains the checksum of a hostile frame, which may not grow beyond the chunk that it changes."""
    import zstandard

    home = versions / "000001"
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (1 << 28))
    (home / deltas.DELTA_FILE).write_bytes(len(bomb).to_bytes(4, "little") + bomb)
    fields = json.loads((home / deltas.DELTA_RECORD).read_text())
    (home / deltas.DELTA_RECORD).write_text(json.dumps(fields | {"delta_sha256": sha256_file(home / deltas.DELTA_FILE)}))
    with pytest.raises(ValueError, match="damaged"):
        deltas.materialize(home)


def test_the_server_applies_deltas_in_place_and_rejects_others(versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    copy = WeightCopy()
    for number in (1, 2):
        assert copy.apply_delta(versions / f"{number:06d}").read_bytes() == full_weights(versions, number)
    other_copy = WeightCopy()  # the process id is the same, as it may be in two containers that share a temporary folder
    with pytest.raises(ValueError, match="not the delta's parent"):
        other_copy.apply_delta(versions / "000003")
    deltas.materialize(versions / "000002")
    assert other_copy.apply_delta(versions / "000003").read_bytes() == full_weights(versions, 3), "a materialized parent is used"
    frames = versions / "000003" / deltas.DELTA_FILE
    good = frames.read_bytes()
    frames.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged"):
        copy.apply_delta(versions / "000003")
    frames.write_bytes(good)
    (versions / "000002" / deltas.WEIGHTS).unlink()
    with pytest.raises(ValueError, match="not the delta's parent"):
        copy.apply_delta(versions / "000003")  # after an error the contents of the copy are unknown
    with pytest.raises(ValueError, match="no delta"):
        copy.apply_delta(versions / "000000")
    copy.remove()
    other_copy.remove()
    copy.remove()
    assert not list((tmp_path / "temporary").iterdir())


@pytest.fixture
def registry(versions: Path) -> FolderRegistry:
    registry = FolderRegistry(versions)
    hashes = [sha256_file(versions / "000000" / deltas.WEIGHTS), *(sha(versions, number) for number in (1, 2, 3))]
    for number, sha256 in enumerate(hashes):
        registry.add(PolicyVersion(number=number, parent=number - 1 if number else None, folder=f"versions/{number:06d}", sha256=sha256))
    return registry


def test_the_registry_verifies_deltas_and_keeps_their_bases(registry: FolderRegistry) -> None:
    for version in registry.versions():
        registry.verify(version)
    assert registry.prune(1) == ()
    deltas.materialize(registry.folder / "000003")
    assert registry.prune(1) == (1, 2)
    registry.verify(registry.versions()[3])
    with pytest.raises(StoreError, match="No such file"):
        registry.verify(registry.versions()[2])
    assert [path.name for path in (registry.folder / "000002").iterdir()] == ["version.json"]


def test_pruning_keeps_the_parents_of_a_serving_delta(registry: FolderRegistry) -> None:
    registry.set_state(2, VersionState.SERVING)
    deltas.materialize(registry.folder / "000003")
    assert registry.prune(1) == ()
    registry.set_state(3, VersionState.SERVING)
    assert registry.prune(1) == (1, 2)


def test_exports_and_evaluations_get_a_whole_model(registry: FolderRegistry, tmp_path: Path) -> None:
    home = registry.folder / "000002"
    exported = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in (*exported, "update.json"):
        if name != deltas.WEIGHTS:
            (home / name).write_text("{}")
    export_model(home, tmp_path / "model", base=registry.folder / "000000", sampling=SamplingConfig())
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [SAMPLING_FILE, *exported]
    assert (tmp_path / "model" / deltas.WEIGHTS).read_bytes() == full_weights(registry.folder, 2)
    (home / deltas.WEIGHTS).unlink()
    assert find_model(str(home), tmp_path) == home
    copy_base_version(home, tmp_path / "base")
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == exported
    assert (home / deltas.WEIGHTS).read_bytes() == full_weights(registry.folder, 2)

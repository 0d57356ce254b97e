"""The checkpoint that a learner resumes from after a power or disk failure during a write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings

from agentrl.base.files import folder_manifest
from agentrl.errors import LearnerError
from agentrl.learner import checkpoint
from agentrl.learner.checkpoint import CheckpointMeta, newest, numbered
from agentrl.records import codec
from tests import strategies
from tests.strategies import examples


def _write(root: Path, number: int) -> Path:
    folder = root / f"{number:06d}"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "weights.pt").write_bytes(bytes(range(256)) * number)
    (folder / "rng_00.pt").write_bytes(b"random")
    (folder / "meta.json").write_bytes(
        codec.to_json(
            CheckpointMeta(
                step=number,
                parent=max(number - 1, 0),
                ranks=1,
                zero_stage=2,
            )
        )
    )
    (folder / "manifest.json").write_text(json.dumps(folder_manifest(folder)))
    return folder


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


TORN: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda folder: _flip(folder / "state" / "weights.pt"),
    "the end of the weights": lambda folder: (folder / "state" / "weights.pt").write_bytes(b"\0" * 100),
    "a file": lambda folder: (folder / "rng_00.pt").unlink(),
    "the record": lambda folder: (folder / "meta.json").write_bytes(b""),
    "the end of the manifest": lambda folder: (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-20]),
    "the manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a file too many": lambda folder: (folder / "state" / "more.pt").write_bytes(b"x"),
}


@pytest.mark.parametrize("damage", TORN)
def test_a_torn_checkpoint_is_skipped(tmp_path: Path, damage: str) -> None:
    _write(tmp_path, 4)
    folder = _write(tmp_path, 5)
    (tmp_path / ".000006.part" / "state").mkdir(parents=True)  # a write that a power failure interrupted
    checkpoint = newest(tmp_path)
    assert checkpoint is not None and checkpoint.folder == folder and checkpoint.meta.step == 5
    TORN[damage](folder)
    alerts: list[str] = []
    checkpoint = newest(tmp_path, alert=alerts.append)
    assert checkpoint is not None and checkpoint.meta.step == 4
    assert [alert.partition("\n")[0] for alert in alerts] == [f"checkpoint {folder} is damaged, so the previous checkpoint is used"]
    assert numbered(tmp_path, 5) is None and numbered(tmp_path, 6) is None
    TORN[damage](tmp_path / "000004")
    with pytest.raises(LearnerError, match=r"every checkpoint in .* is damaged; move that folder away"):
        newest(tmp_path)


@pytest.mark.parametrize(("free", "remaining"), [(0, ["000001", "000004"]), (10**9, ["000001", "000002", "000003", "000004"])])
def test_older_checkpoints_are_deleted_on_a_full_disk(
    free: int, remaining: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3, 4):
        _write(tmp_path, number)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    checkpoint._make_room(tmp_path, lambda: {1})
    assert sorted(path.name for path in tmp_path.iterdir()) == remaining
    assert ("nearly full" in caplog.text) is (free == 0)
    TORN["a file"](tmp_path / "000004")
    _write(tmp_path, 3) if not (tmp_path / "000003").exists() else None
    checkpoint._make_room(tmp_path, tuple)
    assert (tmp_path / "000003").exists(), "the newest is damaged, so a run resumes from the one before it"


def test_a_version_pinned_during_a_checkpoint_write_keeps_its_checkpoint(tmp_path: Path) -> None:
    for number in (1, 2):
        _write(tmp_path, number)
    pinned = set[int]()

    def write(folder: str, **options: object) -> None:
        Path(folder, "state").mkdir()
        pinned.add(1)  # by a user, during the write

    ranks = SimpleNamespace(is_first=True, rank=0, barrier=lambda: None, device=SimpleNamespace(type="cpu"))
    engine: Any = SimpleNamespace(ranks=ranks, deepspeed=SimpleNamespace(save_checkpoint=write))
    meta = CheckpointMeta(step=3, parent=2, ranks=1, zero_stage=2)
    checkpoint.save(tmp_path, engine, meta, keep=1, spare=lambda: frozenset(pinned))
    assert numbered(tmp_path, 1) is not None and numbered(tmp_path, 2) is None and numbered(tmp_path, 3) is not None


def test_newest_is_none_without_checkpoints(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    (tmp_path / ".000001.part").mkdir()
    assert newest(tmp_path) is None


def test_the_newest_checkpoint_is_that_with_the_largest_number(tmp_path: Path) -> None:
    for number, name in ((1, "999999"), (2, "1000000")):
        _write(tmp_path, number).rename(tmp_path / name)
    checkpoint_read = newest(tmp_path)
    assert checkpoint_read is not None and checkpoint_read.meta.step == 2


@given(strategies.records(CheckpointMeta))
@settings(max_examples=examples(15))
def test_checkpoint_metadata_round_trips(meta: CheckpointMeta) -> None:
    assert codec.from_json(CheckpointMeta, codec.to_json(meta)) == meta

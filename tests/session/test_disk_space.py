"""A run reports the disk space that it needs before it starts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import UserError
from agentrl.session.models import check_disk_space, required_disk_space

RECIPE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
GIB = 1 << 30


def model_of(folder: Path, *shapes: tuple[int, ...]) -> Path:
    """A model folder with headers only."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for number, shape in enumerate(shapes):
        size = 4 * math.prod(shape)
        header[f"w{number}"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}  # type: ignore[dict-item]
        at += size
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))


def test_a_large_disk_need_is_reported_and_a_small_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = model_of(tmp_path / "m", (135_000, 1000)), tmp_path / "run"
    required = required_disk_space(RECIPE, model)
    assert (required.version, required.checkpoint, required.base) == (540_000_000, 2_160_000_000, 540_000_000)
    assert required.total == 2 * 540_000_000 + 5 * 540_000_000 + 3 * 2_160_000_000
    free(monkeypatch, 100 * GIB)
    (note,) = check_disk_space(RECIPE, model, run)
    assert note.startswith("the run stores up to 9.6 GiB") and "3 checkpoints of 2.0 GiB" in note and "fix" not in note
    free(monkeypatch, 5 * GIB)
    (note,) = check_disk_space(RECIPE, model, run)
    assert "needs up to 9.6 GiB" in note and "5.0 GiB are free" in note and "lower learner.keep_checkpoints" in note
    free(monkeypatch, 2 * GIB)
    with pytest.raises(UserError, match=r"the first step needs about 3\.0 GiB, but only 2\.0 GiB are free"):
        check_disk_space(RECIPE, model, run)
    free(monkeypatch, 2 * GIB)
    assert check_disk_space(RECIPE, model_of(tmp_path / "small", (1000, 1000)), run) == ()


def test_a_resumed_run_reuses_its_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = model_of(tmp_path / "m", (1000, 1000)), tmp_path / "run"
    (run / "checkpoints" / "000001").mkdir(parents=True)
    with (run / "checkpoints" / "000001" / "state").open("wb") as file:
        file.truncate(required_disk_space(RECIPE, model).total)
    free(monkeypatch, 0)
    assert check_disk_space(RECIPE, model, run) == ()


def test_an_adapter_and_a_critic_are_counted(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", (1000, 500), (1000,))
    lora = required_disk_space(RECIPE.but({"learner.lora.rank": 4}), model)
    assert (lora.version, lora.checkpoint, lora.base) == (4 * 4 * 1500, 16 * 4 * 1500, 4 * 501_000)
    half = required_disk_space(RECIPE.but({"policy.dtype": "bfloat16"}), model)
    assert (half.version, half.checkpoint) == (2 * 501_000, 14 * 501_000)

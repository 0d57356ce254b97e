from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.errors import StoreError
from agentrl.observe import Summary

from .conftest import make_summary


def test_a_summary_comes_back_equal_and_has_the_agreed_keys(tmp_path: Path) -> None:
    summary = make_summary()
    path = summary.write(tmp_path)
    assert Summary.read(tmp_path) == summary
    data = json.loads(path.read_text())
    assert set(data["heldout_before"]) == {"value", "ci_low", "ci_high", "n"}
    assert {"heldout_real_after", "swap_stall_ms_p50", "wall_s", "versions", "by_kind"} <= set(data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_unreached_figures_are_null(tmp_path: Path) -> None:
    summary = Summary(
        name="x",
        finished=False,
        steps=0,
        episodes=0,
        episodes_left_out=0,
        tokens_trained=0,
        weight_swaps=0,
        sandbox_backend="bubblewrap",
        seed=3,
    )
    assert json.loads(summary.write(tmp_path).read_text())["heldout_after"] is None


def test_a_wrong_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Summary.read(tmp_path)
    (tmp_path / "summary.json").write_text('{"name": "x", "unheard_of": 1}')
    with pytest.raises(StoreError, match="not a run summary"):
        Summary.read(tmp_path)
    with pytest.raises(ValidationError, match="unheard_of"):
        Summary(**make_summary().model_dump(), unheard_of=1)

"""The known pace of a server is stored: after a resume, a slow server does not count as normal."""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import pytest

from agentrl.config import Recipe
from agentrl.rollout import Pace
from agentrl.session.pace import PACE_FILE, restore_pace, save_pace
from tests.driving import make_recipe

RECIPE = make_recipe()


def save_new_pace(folder: Path, recipe: Recipe = RECIPE) -> Pace:
    pace, now_s = restore_pace(recipe, folder), 0.0
    for _ in range(20):
        pace.end(pace.begin(now_s), now_s + 10.0, tokens=100, at_most=100)
        now_s += 10.0
    save_pace(pace, recipe, folder)
    return pace


def lost_s(pace: Pace) -> float:
    return pace.end(pace.begin(0.0), 100.0, tokens=100, at_most=100).lost_s


def test_a_resumed_run_compares_the_server_with_its_stored_pace(tmp_path: Path) -> None:
    save_new_pace(tmp_path)
    assert lost_s(restore_pace(RECIPE, tmp_path)) == pytest.approx(90.0)
    assert lost_s(restore_pace(RECIPE, tmp_path / "another")) == 0.0
    slots = restore_pace(make_recipe(), tmp_path).slots
    assert slots == RECIPE.serving.max_num_seqs * RECIPE.serving.replicas


@pytest.mark.parametrize("key", ["serving.threads", "serving.max_num_seqs"])
def test_settings_that_change_the_pace_start_a_new_history(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    save_new_pace(tmp_path)
    other = RECIPE.but({key: 7})
    with caplog.at_level(logging.WARNING):
        assert not restore_pace(other, tmp_path).known
    assert "machine or settings differ from those of" in caplog.text
    assert restore_pace(RECIPE.but({"serving.request_timeout_s": 77.0}), tmp_path).known


def test_another_machine_starts_a_new_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_new_pace(tmp_path)
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert not restore_pace(RECIPE, tmp_path).known


@pytest.mark.parametrize("text", ["", "{", "[]", '{"of": 3}', '{"of": "x", "history": {}}', "[" * 100_000, "\x00"])
def test_an_unreadable_file_starts_a_new_history(tmp_path: Path, text: str) -> None:
    (tmp_path / PACE_FILE).write_text(text)
    assert not restore_pace(RECIPE, tmp_path).known
    save_new_pace(tmp_path)
    assert restore_pace(RECIPE, tmp_path).known


def test_an_empty_history_is_not_written(tmp_path: Path) -> None:
    save_pace(Pace(), RECIPE, tmp_path)
    assert list(tmp_path.iterdir()) == []

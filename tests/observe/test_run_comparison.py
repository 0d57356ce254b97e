from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import StoreError, UserError
from agentrl.observe import RunTracker
from agentrl.observe.run_comparison import compare_folders
from agentrl.observe.stats import Rate, rate_difference
from agentrl.observe.summary import Summary


def run(folder: Path, *, lr: float, after: int, by_kind: dict[str, int], rewards: tuple[float, ...] = (0.1, 0.3)) -> Path:
    tracker = RunTracker(folder)
    for step, reward in enumerate(rewards, 1):
        tracker.log(step, {"reward_mean": reward, "step_s": 2.0 * step, "tokens_trained": 100.0})
    tracker.close()
    (folder / "recipe.json").write_text(f'{{"name": "r", "learner": {{"lr": {lr}, "ranks": 1}}, "extra": {{}}}}')
    fields: dict[str, Any] = {"steps": 2, "episodes": 64, "episodes_left_out": 0, "tokens_trained": 200, "weight_swaps": 2}
    rates = {kind: Rate.from_successes(solved, 20) for kind, solved in by_kind.items()}
    Summary(
        name="r",
        finished=True,
        sandbox_backend="x",
        seed=0,
        heldout_after=Rate.from_successes(after, 40),
        by_kind={"after": rates},
        **fields,
    ).write(folder)
    return folder


def test_runs_are_compared_by_settings_rates_kinds_and_cost(tmp_path: Path) -> None:
    first = run(tmp_path / "first", lr=0.1, after=10, by_kind={"join": 4, "count": 9})
    second = run(tmp_path / "second", lr=0.2, after=30, by_kind={"join": 16})
    compared = compare_folders([first, second])
    assert compared.names == ("first", "second") and compared.settings == (("learner.lr", (0.1, 0.2)),)
    (held_out,) = compared.rates
    low, high = rate_difference(Rate.from_successes(10, 40), Rate.from_successes(30, 40))
    assert held_out.difference == (0.5, low, high)
    assert [row.name for row in compared.kinds] == ["count", "join"] and compared.kinds[0].difference is None
    assert dict(compared.costs)["tokens trained"] == (200.0, 200.0) and dict(compared.costs)["best reward"] == (0.3, 0.3)
    assert dict(compared.costs)["median step"] == (3.0, 3.0), "the mean of the two middle values, 2 s and 4 s"
    text = compared.render()
    assert "learner.lr" in text and "+50.0" in text and "25.0% [" in text and text.splitlines()[0].split()[:2] == ["first", "second"]


def test_an_unfinished_run_has_notes_and_no_invented_numbers(tmp_path: Path) -> None:
    first = run(tmp_path / "first", lr=0.1, after=10, by_kind={})
    (tmp_path / "second").mkdir()
    compared = compare_folders([first, tmp_path / "second"])
    assert dict(compared.costs)["steps"] == (2.0, None) and compared.rates[0].rates[1] is None
    assert any("second: the run has no summary yet" in note for note in compared.notes)
    assert "\n" not in compared.settings[0][0]
    with pytest.raises(UserError, match="at least two"):
        compare_folders([first])
    with pytest.raises(StoreError, match="no run folder"):
        compare_folders([first, tmp_path / "none"])


def test_a_huge_recipe_is_not_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text('{"a": [' + "[]," * 400_000 + "[]]}")
    compared = compare_folders([tmp_path / "a", tmp_path / "b"])
    assert any("recipe.json cannot be read, because it is larger than 1 MiB" in note for note in compared.notes) and not compared.settings


def test_text_of_a_hostile_run_does_not_control_the_terminal(tmp_path: Path) -> None:
    attack = "x\x1b]0;title\x07\x1b[2J\u202e\r\n"
    folders = [run(tmp_path / name, lr=0.1, after=20, by_kind={attack: 5}) for name in ("a", "b\x1b[31m")]
    (folders[0] / "recipe.json").write_text(json.dumps({attack: attack, "learner": {attack: [attack]}}))
    (folders[1] / "metrics.jsonl").write_text("damaged\n")
    text = compare_folders(folders).render()
    assert all(char.isprintable() or char == "\n" for char in text) and "b?[31m" in text and "note: b?[31m: metrics.jsonl" in text

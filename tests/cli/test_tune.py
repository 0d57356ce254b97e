"""Errors of `agentrl tune` before anything is loaded, and the template and groups that it uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import tune
from agentrl.cli.tune import tune_app
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.experience import SqliteStore
from tests.commands import agentrl
from tests.late import REVIEW, late_group


@pytest.mark.parametrize(("way", "option"), [("dpo", "--beta"), ("dpo", "--lr"), ("sft", "--lr"), ("reward", "--lr")])
def test_an_option_that_would_prevent_training_is_rejected(way: str, option: str) -> None:
    result = CliRunner().invoke(tune_app, [way, "runs/none", "--out", "none", option, "0"])
    assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.output


def test_a_tuned_model_keeps_the_template_of_the_episodes(tmp_path: Path) -> None:
    """With `--model` the tuned model may come from elsewhere, with another template."""
    base, out = tmp_path / "run" / "versions" / "000000", tmp_path / "out"
    base.mkdir(parents=True)
    out.mkdir()
    for folder, template in ((base, "of the run"), (out, "of the model")):
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text("{}")
    recipe = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
    for run_recipe, expected in ((recipe, "of the model"), (recipe.but("policy.chat_template=hermes"), "of the run")):
        (tmp_path / "run" / "recipe.json").write_text(run_recipe.model_dump_json())
        tune._done(tmp_path / "run", out, 0.5)
        assert (out / "chat_template.jinja").read_text() == expected


def test_a_model_is_tuned_on_complete_groups_not_on_residuals(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(
        Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F")).model_dump_json()
    )
    store = SqliteStore(tmp_path / "experience.sqlite")
    store.put(late_group(0, replace(REVIEW, residual=True)))
    assert [entry.index for entry in store.entries()] == [-1, 0]
    store.close()
    assert [group.index for group in tune._groups(tmp_path)] == [0]


def test_labels_of_one_kind_cannot_train_a_reward_model(tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_text('{"question": "q", "answer": "a", "label": "right"}\n')
    options = ["--labels", str(tmp_path / "labels.jsonl"), "--model", "recipes/models/tables-base", "--out", str(tmp_path / "out")]
    result = agentrl("tune", "reward", *options)
    assert result.returncode == 2 and "the label files contain no question with a right and a wrong answer\n  fix: " in result.stderr
    assert not result.stdout and not (tmp_path / "out").exists()

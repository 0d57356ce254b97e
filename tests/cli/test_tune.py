"""What the command line refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import tune
from agentrl.cli.tune import tune_app
from agentrl.config import PolicyConfig, Recipe, TasksConfig


@pytest.mark.parametrize(("way", "option"), [("dpo", "--beta"), ("dpo", "--lr"), ("sft", "--lr"), ("reward", "--lr")])
def test_an_option_with_which_nothing_would_be_trained_is_refused(way: str, option: str) -> None:
    found = CliRunner().invoke(tune_app, [way, "runs/none", "--out", "none", option, "0"])
    assert found.exit_code == 2 and f"Invalid value for '{option}'" in found.output


def test_what_is_tuned_keeps_the_template_of_the_episodes(tmp_path: Path) -> None:
    """With `--model` the tuned model may come from elsewhere, with another template."""
    base, out = tmp_path / "run" / "versions" / "000000", tmp_path / "out"
    base.mkdir(parents=True)
    out.mkdir()
    for folder, template in ((base, "of the run"), (out, "of the model")):
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text("{}")
    recipe = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
    for named, kept in ((recipe, "of the model"), (recipe.but("policy.chat_template=hermes"), "of the run")):
        (tmp_path / "run" / "recipe.json").write_text(named.model_dump_json())
        tune._done(tmp_path / "run", out, 0.5)
        assert (out / "chat_template.jinja").read_text() == kept

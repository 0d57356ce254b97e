"""What the command line refuses before anything is loaded."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from agentrl.cli.tune import tune_app


@pytest.mark.parametrize(("way", "option"), [("dpo", "--beta"), ("dpo", "--lr"), ("sft", "--lr"), ("reward", "--lr")])
def test_an_option_with_which_nothing_would_be_trained_is_refused(way: str, option: str) -> None:
    found = CliRunner().invoke(tune_app, [way, "runs/none", "--out", "none", option, "0"])
    assert found.exit_code == 2 and f"Invalid value for '{option}'" in found.output

"""Help texts, the version, and the errors for paths that do not exist."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl import __version__, cli
from agentrl.cli import app
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import UserError
from agentrl.observe import RunTracker
from agentrl.observe.tracker import open_trackers

COMMANDS = [[], ["train"], ["failures"], ["failures", "list"], ["model", "import"], ["sandbox"], ["tune", "sft"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_level_has_both_options_for_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0 and short.output == long.output and "Usage" in short.output


def test_help_lists_every_command_and_imports_none() -> None:
    modules = "sorted(m for m in sys.modules if m.startswith('agentrl.cli.'))"
    code = f"import sys; from agentrl.cli import main\ntry: main(['--help'])\nfinally: print({modules})"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "['agentrl.cli.terminal']"
    for heading, commands in cli.COMMANDS.items():
        assert f"\n{heading}:\n" in done.stdout
        for name, command in commands.items():
            assert f"  {name} " in done.stdout and command.summary in done.stdout


@pytest.mark.parametrize("name", [name for commands in cli.COMMANDS.values() for name in commands])
def test_every_command_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert "Example: agentrl" in shown.output or "Commands" in shown.output


def test_the_version_is_an_option() -> None:
    for arguments in (["--version"], ["version"]):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, done.output) == (0, f"{__version__}\n")


NOWHERE = [
    ["train", "{}.py"],
    ["eval", "{}.py"],
    ["eval", "{}", "--policy", "evals"],
    ["eval", "evals/reading", "--policy", "{}"],
    ["eval", "evals/reading", "--policy", "{}@3"],
    ["eval", "recipes/quickstart.py", "--suite", "{}"],
    ["sample", "{}.py"],
    ["compare", "{}", "{}"],
    ["compare", "{}"],
    ["compare", "{}@3", "{}"],
    ["history", "{}"],
    ["check", "{}"],
    ["practice", "{}", "recipes/quickstart.py"],
    ["report", "{}"],
    ["label", "{}"],
    ["score", "{}", "--list"],
    ["versions", "list", "{}"],
    ["versions", "diff", "{}", "0", "1"],
    ["versions", "rollback", "{}", "1"],
    ["memory", "{}"],
    ["failures", "list", "{}"],
    ["failures", "promote", "{}", "--most", "1", "--into", "/dev/null/x"],
    ["failures", "import", "/dev/null/x", "{}"],
    ["tune", "sft", "{}", "--out", "/dev/null/x"],
    ["tune", "reward", "--labels", "{}", "--model", "{}", "--out", "/dev/null/x"],
    ["model", "import", "{}", "/dev/null/x"],
]


@pytest.mark.parametrize("command", NOWHERE, ids=" ".join)
def test_a_path_that_leads_nowhere_is_named_as_that(command: list[str], tmp_path: Path) -> None:
    """And not as a missing file inside it, which nobody has asked for."""
    where = str(tmp_path / "nowhere")
    done = CliRunner().invoke(app, [word.format(where) for word in command])
    assert isinstance(done.exception, UserError) or done.exit_code == 2, done.output
    said = str(done.exception) if isinstance(done.exception, UserError) else done.output
    first = " ".join(said.split("fix:")[0].split())
    assert "nowhere" in first and any(word in first for word in ("no ", "not exist", "not a ", "not there")), said
    assert not any(inner in first for inner in ("about.json", "suite.toml", "config.json", "recipe.json")), said
    assert not (tmp_path / "nowhere").exists()


def test_with_json_progress_goes_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that says nothing for minutes looks like one that hangs."""
    recipe = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"), trackers=("terminal",))
    for console in (False, True):
        tracker = RunTracker(tmp_path, open_trackers(tmp_path, recipe, console=console), steps=3)
        tracker.stage("start", "server and learner")
        tracker.close()
        out, err = capsys.readouterr()
        assert "server and learner" in (out if console else err) and not (err if console else out)
    assert json.loads((tmp_path / "metrics.jsonl").read_text() or "{}") == {}

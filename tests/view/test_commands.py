"""`agentrl view`, `agentrl compare RUN RUN` and `agentrl report --follow`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from tests.view.runs import RunMaker


@pytest.mark.slow
def test_the_printed_address_works_until_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "agentrl", "view", str(runs), "--port", "0"]
    view = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert view.stdout is not None
        address = view.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:") and "/?token=" in address
        with httpx.Client() as client:
            assert "<title>agentrl view</title>" in client.get(address).text
            base, _, token = address.partition("/?token=")
            headers = {"authorization": f"Bearer {token}"}
            assert {run["name"] for run in client.get(f"{base}/api/runs", headers=headers).json()["runs"]} == {"demo", "other"}
        assert httpx.get(f"{base}/api/runs").status_code == 401
        view.send_signal(signal.SIGINT)
        assert view.wait(20) == 130
    finally:
        view.kill()
        view.wait()


def test_the_compare_command_compares_training_runs(runs: Path) -> None:
    pair = [str(runs / "demo"), str(runs / "other")]
    result = CliRunner().invoke(app, ["compare", *pair])
    assert result.exit_code == 0 and "learner.lr" in result.output and "best reward" in result.output
    data = json.loads(CliRunner().invoke(app, ["compare", *pair, "--json"]).output)
    assert data["names"] == ["demo", "other"] and {row["key"] for row in data["settings"]} == {"learner.lr", "steps"}
    assert CliRunner().invoke(app, ["compare", pair[0], str(runs / "none")]).exit_code != 0


@pytest.mark.slow
def test_a_followed_report_is_rewritten_until_the_run_ends(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.cli.runs._FOLLOW_S", 0.05)
    run = shutil.copytree(runs / "demo", tmp_path / "demo")
    states = iter(["running"] * 1000)
    ended = threading.Event()
    monkeypatch.setattr("agentrl.cli.runs.run_state", lambda path: "finished" if ended.is_set() else next(states))

    def train() -> None:
        time.sleep(0.3)
        maker = RunMaker(run)
        maker.step()
        maker.close()
        time.sleep(0.3)
        ended.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    result = CliRunner().invoke(app, ["report", str(run), "--follow"])
    trainer.join()
    assert result.exit_code == 0 and "report was rewritten" in result.output
    assert "6</b>" in (run / "report.html").read_text() or "step 6" in (run / "report.html").read_text()

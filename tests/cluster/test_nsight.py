"""Commands for Nsight Systems, with a substitute program that records them: no GPU is needed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.cluster.nsight import NsightSessions
from agentrl.cluster.process_host import LocalLauncher
from agentrl.errors import InfrastructureError, UserError
from agentrl.protocols.cluster import PARENT, PYTHON, PartCommand

NSYS = """#!/bin/bash
printf '%s\\n' "${*//$'\\n'/ }" >> {calls}
command=$1; shift
[ "$command" = {failing} ] && { echo broken; exit 3; }
[ "$command" = launch ] || exit 0
while [[ $1 == --* ]]; do shift; done
"$@"
"""
REPORT = "import os, sys; print(sys.argv[1:], os.getppid() == int(sys.argv[1]))"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the program records its calls."""
    return install(tmp_path, monkeypatch)


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str = "none") -> Path:
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    (programs / "nsys").write_text(NSYS.replace("{calls}", shlex.quote(str(calls))).replace("{failing}", failing))
    (programs / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return calls


@pytest.mark.slow
async def test_learner_and_servers_start_under_nsys_and_are_recorded_between_start_and_stop(tmp_path: Path, calls: Path) -> None:
    """A part gets the process id of its parent, which is now nsys, so that it dies with it."""
    nsight = NsightSessions(tmp_path / "nsight")
    launcher = LocalLauncher(tmp_path, wrap=nsight.wrap)
    for name in ("learner", "server-0", "redis"):
        part = await launcher.start(PartCommand(name=name, argv=(PYTHON, "-c", REPORT, PARENT, "two words"), log=f"logs/{name}.log"))
        assert await part.wait() == 0
        log = (tmp_path / "logs" / f"{name}.log").read_text()
        assert "'two words'] True" in log, log
    await nsight.start()
    await nsight.stop()
    await launcher.close()
    launched, second_launch, *rest = calls.read_text().splitlines()
    assert launched.startswith("launch --session-new=agentrl-") and "-learner-0 " in launched and "--trace=cuda" in launched
    assert "-server-0-1 " in second_launch
    assert sorted(line.split()[0] for line in rest) == ["start", "start", "stop", "stop"], "redis is not recorded"
    session = launched.split()[1].replace("--session-new", "--session")
    assert any(session in line and f"--output={tmp_path}/nsight/learner" in line for line in rest if line.startswith("start"))


async def test_a_restarted_part_is_recorded_in_its_newest_session(tmp_path: Path, calls: Path) -> None:
    nsight = NsightSessions(tmp_path)
    for _ in range(2):
        nsight.wrap(PartCommand(name="server", argv=(PYTHON,), log="x"))
    await nsight.stop()
    assert calls.read_text().splitlines()[0].endswith("-server-1")


async def test_the_path_of_a_report_is_escaped_for_nsys(tmp_path: Path, calls: Path) -> None:
    """In `--output`, nsys replaces `%h` and `%q{VARIABLE}`: a report would have another path, or a secret in its name."""
    nsight = NsightSessions(tmp_path / "90% %q{AGENTRL_CELL_KEY}")
    nsight.wrap(PartCommand(name="learner", argv=(PYTHON,), log="x"))
    await nsight.start()
    assert "/90%% %%q{AGENTRL_CELL_KEY}/learner " in calls.read_text()


async def test_an_error_of_nsys_names_the_command_and_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, failing="start")
    nsight = NsightSessions(tmp_path)
    nsight.wrap(PartCommand(name="learner", argv=(PYTHON,), log="x"))
    with pytest.raises(InfrastructureError, match=r"nsys start --session=.* failed: broken"):
        await nsight.start()


def test_without_nsys_or_a_gpu_the_command_reports_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="no NVIDIA GPU is visible"):
        NsightSessions(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["profile", "recipes/quickstart.py", "--nsight", "--run-dir", str(tmp_path / "run")])
    assert isinstance(result.exception, UserError) and "nsys is not installed" in str(result.exception) and not (tmp_path / "run").exists()

"""A stranger's project: written by the built wheel, outside the repo, trains at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, SMALL, agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]


@pytest.mark.usefixtures("nothing_left")
def test_project_from_the_wheel_trains(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, timeout=900)
    (wheel,) = (tmp_path / "dist").glob("agentrl-*.whl")
    installed = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=900
    )
    env = {"PYTHONPATH": str(installed)}
    project = tmp_path / "my-agent"
    code, output = agentrl("init", str(project), cwd=tmp_path, env=env)
    assert code == 0, output
    shown = subprocess.run(
        [sys.executable, "-c", "import agentrl; print(agentrl.__file__)"], cwd=project, env=env, capture_output=True, text=True, check=True
    )
    assert str(installed) in shown.stdout, "the wheel is what runs, not the checkout"
    code, output = agentrl("train", "recipes/quickstart.py", "steps=1", *SMALL, "--sandbox", "bubblewrap", cwd=project, env=env)
    assert code == 0, output
    (run,) = (project / "runs").iterdir()
    assert summary(run)["steps"] == 1
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=project, env={**env, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert tests.returncode == 0, tests.stdout

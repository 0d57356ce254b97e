"""A project created by the built wheel, outside the repository, trains from the first evaluation to the last with real parts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.base.files import sha256_file

from .conftest import ROOT, SMALL, agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.docker]

RECIPE = "recipes/quickstart.py"
DELTAS = ("learner.lr=1e-7", "serving.weight_transfer=delta")  # a step small enough for deltas to pay


@pytest.mark.usefixtures("nothing_left")
def test_a_project_from_the_wheel_trains_with_deltas_and_any_version_can_be_evaluated(tmp_path: Path) -> None:
    project, env = _project(tmp_path)
    started = time.monotonic()
    code, output = agentrl("train", RECIPE, "steps=3", *SMALL, *DELTAS, "--sandbox", "docker", cwd=project, env=env)
    elapsed = time.monotonic() - started
    assert code == 0, output
    assert "the server rejected its delta" not in output, "the server loaded the deltas directly"
    (run,) = (project / "runs").iterdir()
    _check_finished(run)
    assert 0.8 * elapsed - 4 < sum(summary(run)["wall_s"].values()) < elapsed, "the reported minutes match the clock"
    versions = _check_deltas(run)
    arguments = ("evaluation.heldout=4", "evaluation.heldout_real=0", "--run-dir", str(tmp_path / "eval"), "--json", "--sandbox", "docker")
    code, output = agentrl("eval", RECIPE, "--model", str(versions[2]), *arguments, cwd=project, env=env)
    assert code == 0 and json.loads(output.splitlines()[-1])["heldout"]["n"] == 4, output
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=project, env={**env, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert tests.returncode == 0, tests.stdout


def _project(folder: Path) -> tuple[Path, dict[str, str]]:
    """The project that `agentrl init` of an installed wheel creates, and the environment that runs this wheel."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, timeout=900)
    (wheel,) = (folder / "dist").glob("agentrl_posttraining-*.whl")
    installed, project = folder / "installed", folder / "my-agent"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=900
    )
    env = {"PYTHONPATH": str(installed)}
    code, output = agentrl("init", str(project), cwd=folder, env=env)
    assert code == 0, output
    completed = subprocess.run(
        [sys.executable, "-c", "import agentrl; print(agentrl.__file__)"], cwd=project, env=env, capture_output=True, text=True, check=True
    )
    assert str(installed) in completed.stdout, "the wheel runs, not the checkout"
    return project, env


def _check_finished(run: Path) -> None:
    result = summary(run)
    assert result["sandbox_backend"] == "docker"
    assert (result["steps"], result["weight_swaps"], result["episodes"]) == (3, 3, 48)
    for key in ("heldout_before", "heldout_after", "heldout_real_before", "heldout_real_after"):
        rate = result[key]
        assert 0.0 <= rate["ci_low"] <= rate["value"] <= rate["ci_high"] <= 1.0
        assert rate["n"] == (2 if "real" in key else 4)
    assert result["swap_probe_max_abs_diff"] <= 1e-3
    assert result["episodes_left_out"] == 0 and result["tokens_trained"] > 0 and result["delivered_share"] == 1
    report = (run / "report.html").read_text()
    assert "http://" not in report.replace("http://www.w3.org", "") and len(report) > 10_000


def _check_deltas(run: Path) -> list[Path]:
    """Returns the folders of all versions. The export is the complete last version, with the other files of version 0."""
    folders = [run / "versions" / f"{number:06d}" for number in range(4)]
    assert [(folder / "model.delta").exists() for folder in folders] == [False, False, True, True]
    assert [(folder / "model.safetensors").exists() for folder in folders] == [True, True, False, True], "the last version was exported"
    assert (run / "model" / "model.safetensors").exists() and not (run / "model" / "model.delta").exists()
    assert sha256_file(run / "model" / "model.safetensors") == sha256_file(folders[3] / "model.safetensors")
    served = {path.name for path in folders[0].iterdir()} - {"version.json"}
    assert served <= {path.name for path in (run / "model").iterdir()}
    return folders

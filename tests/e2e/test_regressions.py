"""Failures of a real policy become cases, which `agentrl eval --policy` and pytest evaluate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.failure.case import Case, save_case
from agentrl.records import Split
from sandboxes.tables import Tables
from tests.e2e.conftest import ROOT, SMALL, agentrl

MODEL = ROOT / "recipes" / "models" / "tables-base"


@pytest.mark.e2e
@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_policy_is_evaluated_on_a_suite(tmp_path: Path, forked: tuple[str, ...]) -> None:
    suite = ROOT / "runs" / f"e2e-suite-{os.getpid()}"  # in the project, whose images and verifiers the cases name
    try:
        family = Tables(seed=11)
        for number in range(6):
            save_case(suite, Case(id=f"case-{number}", task=family.task(Split.HELDOUT, number), threshold=0.0 if number else 2.0))
        (suite / "suite.toml").write_text(f'policy = "{MODEL.relative_to(ROOT)}"\n')
        run = tmp_path / "run"
        overrides = [item for item in SMALL if item.startswith(("rollout.concurrency", "sandbox"))]
        code, out = agentrl("eval", str(suite), *overrides, "--policy", str(MODEL), "--run-dir", str(run), "--json", by=forked)
        result = json.loads(out.splitlines()[-1])
        assert code == 1 and [case["case"] for case in result["cases"] if case["verdict"] != "passed"] == ["case-0"], out
        assert result["judges"] == {}, "no judge was called"
        assert agentrl("failures", "list", str(run))[0] == 0, "attempts below 1 were captured, although a case may require more than 1"
        command = [sys.executable, "-m", "pytest", "-p", "agentrl.evaluation.pytest_plugin", "-p", "no:cacheprovider", "-k", "not case-0"]
        command += [str(suite), "-o", "addopts=", "--agentrl-run-dir", str(tmp_path / "again")]  # the policy recorded in suite.toml
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
        assert completed.returncode == 0 and "5 passed, 1 deselected" in completed.stdout, completed.stdout + completed.stderr
    finally:
        subprocess.run(["rm", "-rf", str(suite)], check=True)

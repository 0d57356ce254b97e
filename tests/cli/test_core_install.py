"""The installation without extras can read recipes, records and run folders, on machines that do not serve or train."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentrl.records import PolicyVersion, VersionState
from agentrl.version import FolderRegistry

ROOT = Path(__file__).resolve().parents[2]

# Runs a program in which the modules named on the command line cannot be imported.
WITHOUT = """
import importlib.abc, json, sys

class Missing(importlib.abc.MetaPathFinder):
    modules = set(json.loads(sys.argv[1]))
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
exec(sys.argv[2])
"""


def _core() -> set[str]:
    """Names of the distributions in the dependencies of the core, including indirect ones."""
    pending = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    names: set[str] = set()
    while pending:
        item = Requirement(pending.pop())
        name = re.sub(r"[-_.]+", "-", item.name).lower()
        if name in names or (item.marker is not None and not any(item.marker.evaluate({"extra": extra}) for extra in ("", *item.extras))):
            continue
        names.add(name)
        try:
            pending += requires(name) or []
        except PackageNotFoundError:
            raise AssertionError(f"{name} is not installed here") from None
    return names


def core_only(code: str) -> str:
    core = _core()
    owners = {module: {re.sub(r"[-_.]+", "-", name).lower() for name in names} for module, names in packages_distributions().items()}
    missing = [module for module, names in owners.items() if not names & core and not module.startswith(("agentrl", "_"))]
    assert {"numpy", "scipy", "torch", "transformers", "tensorboard"} <= set(missing)
    command = [sys.executable, "-c", WITHOUT, json.dumps(missing), code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_run_folders_recipes_and_task_folders_can_be_read(tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path / "versions")
    registry.add(PolicyVersion(number=0, parent=None, folder="versions/000000", sha256="0" * 64))
    registry.set_state(0, VersionState.SERVING)
    registry.set_evals(0, {"heldout": 0.75})
    rate = {"value": 0.75, "ci_low": 0.5, "ci_high": 0.9, "n": 32}
    evaluation = rate | {"attempts": 1, "tokens_mean": 40.0, "pass_at": {"1": 0.75}}
    (tmp_path / "evaluations.json").write_text(json.dumps({"before": {"heldout": evaluation}}))
    folder = str(tmp_path)
    output = core_only(
        f"""
from pathlib import Path
from agentrl.cli import app
from agentrl.cli.check import open_target
from agentrl.cli.running import load_recipe
from agentrl.observe import Rate
from agentrl.session.measure import read_evaluation
app(["versions", "list", {folder!r}], standalone_mode=False)
app(["report", {folder!r}], standalone_mode=False)
print(read_evaluation(Path({folder!r}), "before")["heldout"]["ci_low"])
print(Rate.from_scores([0.25, 0.5]).n, Rate.from_scores([1.0]).n)
print(load_recipe(Path("recipes/quickstart.py"), ["learner.lr=1e-4"])[1].name, open_target("sandboxes/chores", None)[0].open().name)
"""
    ).splitlines()
    assert "serving" in output[1] and "heldout 0.750" in output[1]
    assert output[2:] == [str(tmp_path / "report.html"), "0.5", "2 1", "quickstart chores"]

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from agentrl.cluster import dockerfile as module
from agentrl.cluster.dockerfile import dockerfile, project_requirement
from agentrl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def steps(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile."""
    joined = re.sub(r"\\\n", "", re.sub(r"(?m)^#.*\n", "", text))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines()]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_step_is_valid_shell_and_the_last_user_is_not_root(device: str) -> None:
    text = dockerfile(device, project_requirement(ROOT, device), ["sandboxes/a b", "sandboxes/$(x)"])  # type: ignore[arg-type]
    instructions = steps(text)
    assert {name for name, _ in instructions} <= {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    for name, command in instructions:
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", command], check=True)
    assert [content for name, content in instructions if name == "USER"] == ["1000"]
    assert ("torch==" in text) == (device == "cpu"), "for GPUs, pip installs the upstream build"
    build_command = next(command for name, command in instructions if "ensure_rootfs" in command)
    assert {"sandboxes/a b", "sandboxes/$(x)"} <= set(shlex.split(build_command))


def test_the_versions_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"torch=={module._TORCH}" in extras["cpu"]
    assert set(module._EXTRAS.split(",")) | {"cpu", "gpu"} <= set(extras)
    packages = re.findall(r"(?m)^need (\S+)", (ROOT / "scripts" / "setup_system.sh").read_text())
    outside_pods = {"docker.io", "crun", "iproute2"}  # the demonstration of several hosts needs iproute2
    assert set(packages) - outside_pods <= set(module._PACKAGES), "the packages that a machine needs"
    assert "wget" in module._PACKAGES and "'ray[default]==2.60.0'" in dockerfile("gpu", "x"), "probes of KubeRay, and the job's submission"


def test_a_project_installs_agentrl_from_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert project_requirement(ROOT, "cpu") == ".[cpu,cluster,redis,rewards,gateway]"
    with pytest.raises(UserError, match="from a folder on this machine"):
        project_requirement(tmp_path, "cpu")
    monkeypatch.setattr(module, "requirement", lambda: "agentrl-posttraining==0.1.0")
    assert project_requirement(tmp_path, "gpu") == "agentrl-posttraining[gpu,cluster,redis,rewards,gateway]==0.1.0"
    requirement = project_requirement(tmp_path, "cpu", "agentrl-posttraining @ git+https://host/a@1")
    assert requirement == "agentrl-posttraining[cpu,cluster,redis,rewards,gateway] @ git+https://host/a@1"
    with pytest.raises(UserError, match="quotes or control characters"):
        project_requirement(tmp_path, "cpu", "x'; rm -rf /; '")

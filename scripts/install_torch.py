"""Installs torch into the virtual environment that runs this script: the CPU build, if there is one and the machine has no NVIDIA GPU.

    python scripts/install_torch.py 2.13.0

pip's default index serves a build with several gigabytes of CUDA packages. If the configured index serves a CPU build, that is used;
otherwise uv fetches one from PyTorch's own index (`--torch-backend cpu`). If that index cannot be reached within a short time, the
configured index decides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

PROBE_S = 30.0  # to find out whether PyTorch's index answers
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
GPUS = Path("/proc/driver/nvidia/gpus")

Run = Callable[[Sequence[str], float | None], "subprocess.CompletedProcess[str]"]


def run(command: Sequence[str], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    """Runs a command. Returns exit code 124 if it takes longer than `timeout_s`."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", "timeout")


def serves_cpu_build(python: str, version: str, run: Run) -> bool:
    """Whether the configured index installs a CPU build."""
    target = ("install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", "-", f"torch=={version}")
    result = run([python, *PIP, *target], None)
    try:
        installed = json.loads(result.stdout)["install"]
    except (ValueError, KeyError):
        return False
    return any(item["metadata"]["version"].endswith("+cpu") for item in installed)


def install_with_uv(python: str, version: str, run: Run) -> bool:
    """Installs the CPU build of PyTorch's own index. Returns whether that worked."""
    with tempfile.TemporaryDirectory(prefix="agentrl-uv-") as folder:
        if run([python, *PIP, "install", "--quiet", "--no-deps", "--target", folder, "uv"], 4 * PROBE_S).returncode:
            return False
        uv = [
            str(Path(folder, "bin", "uv")),
            "pip",
            "install",
            "--python",
            python,
            "--torch-backend",
            "cpu",
            "--no-deps",
            f"torch=={version}",
        ]
        if run([*uv, "--dry-run", "--quiet"], PROBE_S).returncode:
            return False
        return run(uv, None).returncode == 0


def install(python: str, version: str, *, has_gpu: bool, run: Run = run) -> int:
    """Installs torch and reports which build. Returns pip's exit code."""
    if not has_gpu and not serves_cpu_build(python, version, run):
        if install_with_uv(python, version, run):
            print(f"set-up: torch {version}, CPU build from PyTorch's index")
            return 0
        print(f"set-up: PyTorch's index does not answer, so torch {version} comes from the configured index, perhaps with CUDA")
    result = run([python, *PIP, "install", "--quiet", "--no-compile", "--no-deps", "--retries", "5", f"torch=={version}"], None)
    print(result.stderr, end="", file=sys.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(install(sys.executable, sys.argv[1], has_gpu=GPUS.is_dir()))

"""A real full disk: a small tmpfs in its own mount namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def writer_errors(folder: Path, kind: str) -> dict[str, Any]:
    program = f"mount -t tmpfs -o size=1m none {folder} && exec {sys.executable} -m tests.session.full_disk_script {folder} {kind}"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", program]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    errors: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return errors


@pytest.mark.bubblewrap  # user namespaces
def test_every_writer_of_a_run_reports_a_full_disk(tmp_path: Path) -> None:
    errors = writer_errors(tmp_path, "light")
    assert set(errors) >= {"store", "metrics", "summary", "registry", "failures"}, "closing may still find space"
    assert all(full for _, _, full in errors.values()), errors
    assert errors["store"][0] == "StoreError" and "the disk is full" in errors["store"][1]
    assert errors["failures"][0] == "DiskFull"


@pytest.mark.bubblewrap
@pytest.mark.slow
def test_the_learners_checkpoint_writer_reports_a_full_disk(tmp_path: Path) -> None:
    """torch's writer reports no reason: a checkpoint that did not fit became a C++ stack trace."""
    assert {name: (kind, text) for name, (kind, text, _) in writer_errors(tmp_path, "torch").items()} == dict.fromkeys(
        ("torch.save", "safetensors"), ("DiskFull", "no room to write it")
    )

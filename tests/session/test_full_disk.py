"""A real full disk: a small tmpfs in a mount namespace of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def said(folder: Path, kind: str) -> dict[str, Any]:
    program = f"mount -t tmpfs -o size=1m none {folder} && exec {sys.executable} -m tests.session.full_disk_script {folder} {kind}"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.bubblewrap  # user namespaces
def test_every_writer_of_a_run_says_that_the_disk_is_full(tmp_path: Path) -> None:
    found = said(tmp_path, "light")
    assert set(found) >= {"store", "metrics", "summary", "registry", "failures"}, "closing may find a last byte"
    assert all(full for _, _, full in found.values()), found
    assert found["store"][0] == "StoreError" and "the disk is full" in found["store"][1]
    assert found["failures"][0] == "DiskFull"


@pytest.mark.bubblewrap
@pytest.mark.slow
def test_what_the_learner_saves_with_says_so_too(tmp_path: Path) -> None:
    """torch's writer knows no reason: a checkpoint that did not fit was told as a page of its C++."""
    assert {name: (kind, text) for name, (kind, text, _) in said(tmp_path, "torch").items()} == dict.fromkeys(
        ("torch.save", "safetensors"), ("DiskFull", "no room to write it")
    )

"""Faults around a run folder: two drivers, a disk that fills up, a killed driver. All parts are real."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ledgers import assert_every_group_taken_once

from .conftest import ROOT, SMALL, agentrl, descendants, start, steps_logged, summary, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart.py"


@pytest.fixture
def small_disk(tmp_path: Path, own_mounts: None) -> Iterator[Path]:
    """A file system of 1.2 GiB; mounting it needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200m", "none", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    handle = os.open(disk / "filler", os.O_CREAT | os.O_WRONLY)
    for block in (1 << 20, 4096):
        try:
            while True:
                os.write(handle, bytes(block))
        except OSError:
            pass
    os.close(handle)
    return disk / "filler"


def resume_command(output: str) -> list[str]:
    (told,) = (line for line in output.splitlines() if "continue with: " in line)
    return shlex.split(told.partition("continue with: ")[2])


@pytest.mark.usefixtures("nothing_left")
def test_two_drivers_a_full_disk_and_a_killed_driver_lose_no_step(small_disk: Path) -> None:
    run = small_disk / "run"
    small = ("steps=6", *SMALL, "evaluation.heldout=4", "evaluation.heldout_real=0")
    arguments = ("train", RECIPE, *small, "--run-dir", str(run), "--sandbox", "bubblewrap")
    process = start(*arguments)
    wait_for(lambda: (run / "recipe.json").exists(), process, timeout=600)
    for again in ((*arguments, "--resume"), arguments):
        code, output = agentrl(*again, timeout=300)
        assert code == 2 and f"is driven by another agentrl: process {process.pid} on " in output, output
        assert len(output.splitlines()) == 2

    wait_for(lambda: 1 in steps_logged(run), process, timeout=900)
    filler = fill(small_disk)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    told = output[output.index("failed:") :].splitlines()
    assert f"the disk of {run} is full" in told[0] and len(told) <= 4 and "Traceback" not in output, output

    filler.unlink()
    command = resume_command(output)
    assert "steps=6" in command and "--resume" in command
    killed = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: descendants(killed, "agentrl.learner.main") != [], killed, timeout=600)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    last = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert last.returncode == 0, last.stdout + last.stderr
    assert summary(run)["finished"] and steps_logged(run) == [1, 2, 3, 4, 5, 6]
    assert_every_group_taken_once(run, steps=6, per_step=4)

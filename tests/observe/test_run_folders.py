"""The state of a run, as other processes see it."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

from agentrl.base.run_lock import DRIVER
from agentrl.base.scratch import ScratchFolder
from agentrl.observe.run_folders import held_locks, run_state


@pytest.mark.parametrize("disk", [tempfile.gettempdir(), "/dev/shm"])
def test_a_run_is_running_while_its_driver_holds_the_lock(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", disk)
    with ScratchFolder() as folder:
        (folder / DRIVER).touch()
        assert run_state(folder) == "unknown"
        with (folder / DRIVER).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert run_state(folder) == run_state(folder, held_locks()) == "running"
        assert run_state(folder) == "unknown"


def test_a_lock_on_a_different_device_with_the_same_inode_does_not_count(tmp_path: Path) -> None:
    (tmp_path / DRIVER).touch()
    with (tmp_path / DRIVER).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        inode = (tmp_path / DRIVER).stat().st_ino
        (device,) = held_locks()[inode]
        assert run_state(tmp_path, {inode: {device, "fe:99"}}) == "running"
        assert run_state(tmp_path, {inode: {"fe:99"}}) == "unknown"

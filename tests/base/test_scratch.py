"""Scratch folders: removed at the end, and after a kill by the next process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.scratch import ScratchFolder, _prefix
from tests.descriptors import descriptors_left

HOLD = """
from agentrl.base.scratch import ScratchFolder

folder = ScratchFolder()
(folder.path / "weights").write_text("x")
print(folder.path, flush=True)
input()
"""
CHURN = """
from agentrl.base.scratch import ScratchFolder

for _ in range(100):
    with ScratchFolder() as path:
        (path / "a").write_text("x")
        assert (path / "a").read_text() == "x"
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # otherwise the folder that was read from TMPDIR first is used
    yield tmp_path
    tempfile.tempdir = None


def test_a_folder_is_private_and_is_removed_with_its_content(temporary: Path) -> None:
    with ScratchFolder() as path:
        assert path.parent == temporary and path.stat().st_mode & 0o777 == 0o700
        (path / "locked").mkdir(mode=0o500)
    assert not path.exists()
    folder = ScratchFolder()
    folder.remove()
    folder.remove()
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_running_process_is_not() -> None:
    killed, running = (
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        assert killed.stdout is not None and running.stdout is not None
        abandoned, used = Path(killed.stdout.readline().strip()), Path(running.stdout.readline().strip())
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (abandoned / "weights").exists()
        with ScratchFolder():
            assert not abandoned.exists() and (used / "weights").exists()
        running.communicate("\n", timeout=60)
        assert not used.exists()
    finally:
        for process in (killed, running):
            process.kill()
            process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_file_system_in_the_folder_of_a_killed_process_is_unmounted(temporary: Path) -> None:
    disk = temporary / f"{_prefix()}x" / "disk"
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "none", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    (disk / "weights").write_text("x")
    try:
        with ScratchFolder():
            assert not disk.parent.exists()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True, check=False)


FORK = """
import os, sys
from agentrl.base.scratch import ScratchFolder

folder, removed = ScratchFolder(), ScratchFolder()
with ScratchFolder() as block:
    if (child := os.fork()) == 0:
        removed.remove()
        sys.exit(0)  # leaves the block, and runs the finalizers
    assert os.waitpid(child, 0)[1] == 0
    assert folder.path.exists() and removed.path.exists() and block.exists()
    ScratchFolder().remove()  # removes abandoned folders
    assert folder.path.exists() and removed.path.exists() and block.exists()
"""


def test_a_forked_process_that_exits_does_not_remove_the_folders_of_its_parent(temporary: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True)
    assert not list(temporary.iterdir()), "the parent removes them"


def test_other_folders_are_not_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, target, elsewhere = temporary / "agentrl-runs", temporary / "target", temporary / "agentrl-scratch-00000000-x"
    for folder in (mine, target, elsewhere):  # the last one is that of a different machine
        folder.mkdir()
    (temporary / f"{_prefix()}link").symlink_to(target)
    (temporary / f"{_prefix()}file").write_text("x")
    before = {*temporary.iterdir()}
    with ScratchFolder():
        pass
    assert {*temporary.iterdir()} == before
    (temporary / f"{_prefix()}other").mkdir()
    with monkeypatch.context() as patches:
        patches.setattr(os, "geteuid", lambda: os.getuid() + 1)  # the folder belongs to a different user
        with ScratchFolder():
            pass
    assert (temporary / f"{_prefix()}other").is_dir()


def test_processes_that_create_folders_at_the_same_time_keep_theirs(temporary: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", CHURN]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 3
    assert not list(temporary.iterdir())


def test_a_temporary_folder_that_cannot_be_listed_is_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tempfile.gettempdir()  # the first call writes a file
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if path == str(temporary):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with ScratchFolder() as path:
        assert path.parent == temporary
    assert not path.exists()


def test_without_a_free_descriptor_no_folder_is_left(temporary: Path) -> None:
    tempfile.gettempdir()  # the first call writes a file
    with descriptors_left(0), pytest.raises(OSError, match="Too many open files"):
        ScratchFolder()
    assert not list(temporary.iterdir())

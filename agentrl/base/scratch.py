"""Temporary folders that do not stay on disk if their process is killed.

The process that creates a folder holds a kernel lock (flock) on it until it removes the folder. The kernel releases the lock when the
process dies. Whenever a process creates a folder, it first removes those of the same user and machine whose lock is free. The names contain
the start of the machine's boot id, because locks on a shared file system may not be visible on other machines.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

from agentrl.base.processes import boot_id


class ScratchFolder:
    """A private temporary folder, which exists until `remove` is called. As a context manager, yields the path and removes the folder at
    the end of the block. Only the process that created the folder removes it; forked processes do not.

    Raises `OSError` if the folder cannot be created, or if no file descriptor is free.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        while True:
            folder = tempfile.TemporaryDirectory(prefix=_prefix(), ignore_cleanup_errors=True)
            self.path = Path(folder.name)
            if (handle := _lock(self.path)) is not None:
                break
        folder._finalizer.detach()  # type: ignore[attr-defined]  # would also run when a forked process exits
        self._remove = weakref.finalize(self, _remove, folder, handle, os.getpid())

    def remove(self) -> None:
        """Removes the folder with its content. Does nothing if it no longer exists."""
        self._remove()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def _remove(folder: tempfile.TemporaryDirectory[str], handle: int, owner: int) -> None:
    if os.getpid() == owner:
        folder.cleanup()
        os.close(handle)


def _prefix() -> str:
    return f"agentrl-scratch-{boot_id()}-"


def _lock(folder: Path) -> int | None:
    """Locks a new folder and returns the descriptor that holds the lock; None if a different process is just removing the folder."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(folder)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # the file system has no locks, so no process removes folders of others either
        return handle
    os.close(handle)
    return None


def _remove_abandoned() -> None:
    """Removes the scratch folders of this user whose process has exited, and unmounts the file systems directly in them."""
    try:
        with os.scandir(tempfile.gettempdir()) as entries:
            folders = [entry.path for entry in entries if entry.name.startswith(_prefix())]
    except PermissionError:  # a temporary folder that this user may write to but not list
        return
    for folder in folders:
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed in the meantime, or the folder of a different user
            continue
        try:
            if os.fstat(handle).st_uid == os.geteuid():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for mounted in filter(os.path.ismount, Path(folder).iterdir()):
                    subprocess.run(["umount", "--lazy", str(mounted)], capture_output=True, check=False)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, or the file system has no locks
            pass
        finally:
            os.close(handle)

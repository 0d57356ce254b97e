"""Locks that allow one driver per run folder. They are kernel locks (flock), which are released when the processes that hold them exit.

Only the driver holds `.driver.lock`; its child processes do not inherit it. The servers and the learner share `.parts.lock`. The kernel
kills them when their driver dies, but not at the same instant, so the next driver waits until the last of them has exited before it reads
the folder.

A lock file with several hard links, such as after `cp -al` of the folder, would lock all of these folders, and the holder's record would
change the content of every link. Therefore the next driver replaces the file in its folder. If the lock is held at that time, the folder
counts as in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.errors import RunFolderBusy, UserError

DRIVER, PARTS = ".driver.lock", ".parts.lock"
_READ_TRIES = 20  # of 10 ms each; a holder writes its record immediately after it acquires the lock
_REMOVED_TRIES = 100  # to create a folder that another process removes; below /proc every attempt fails
_PATIENCE_S = 1.0  # seconds before a message reports what the driver waits for
_NOT_REGULAR = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)  # opened: a link, a folder, a socket, a device
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds the driver lock of a run folder."""

    pid: int
    host: str
    since: str  # local time with its zone, ISO 8601
    command: str


@contextmanager
def drive_folder(folder: Path, *, command: str, wait_s: float = 60.0) -> Iterator[None]:
    """Locks `folder` during the block, for this process as its driver. Creates the folder if needed, and removes it at the end if it is
    empty.

    Args:
        command: the command of this process, for the error message of other processes.
        wait_s: seconds to wait for the servers and the learner of a driver that died.

    Raises `RunFolderBusy`, with the holder if it is known, if a different process drives the folder, and `UserError` if the folder cannot
    be created or locked, if a lock file is not a regular file, or if a process of a dead driver does not exit.
    """
    handle = _taken(folder)
    try:
        _write(handle, Holder(pid=os.getpid(), host=socket.gethostname(), since=time.strftime("%Y-%m-%dT%H:%M:%S%z"), command=command))
        _wait_for_parts(folder, wait_s)
        yield
    finally:
        _remove_if_vacant(folder)
        os.close(handle)


def is_vacant(folder: Path) -> bool:
    """Whether a folder does not exist, or contains nothing except its lock file."""
    return not folder.exists() or (folder.is_dir() and {entry.name for entry in folder.iterdir()} <= {DRIVER})


def hold_shared_lock(folder: Path) -> int:
    """Acquires the shared lock, and returns its descriptor for `pass_fds`. The lock is held until every process has closed it.

    Raises `UserError` if the lock file is not a regular file, and `OSError` if it cannot be opened.
    """
    handle = _open_lock(folder / PARTS, os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def _open_lock(path: Path, flags: int = 0) -> int:
    """Opens a lock file. Raises `UserError` for a symbolic link, a folder, a pipe or a device: the folder may come from a third party, and
    the holder's record would overwrite a different file, or opening the file would block."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    except OSError as error:
        if error.errno not in _NOT_REGULAR:
            raise
    raise UserError(f"{path} is not a regular file, or is a symbolic link", fix=f"remove {path}, or choose a different --run-dir")


def _taken(folder: Path) -> int:
    """Acquires the driver's lock and returns its descriptor. Retries if the last driver has just removed the folder."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{str(folder)!a} cannot be used as a run folder: its name is not UTF-8", fix="choose a different --run-dir"
        ) from None
    path, lacking = folder / DRIVER, 0
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            handle = _open_lock(path, os.O_CREAT)
        except OSError as error:
            lacking += 1
            if isinstance(error, FileNotFoundError) and lacking < _REMOVED_TRIES:
                continue  # the file was removed between the two calls
            raise UserError(f"{folder} cannot be used as a run folder: {error.strerror}", fix="choose a different --run-dir") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(handle, path) and not _unlink_if_hard_linked(handle, path):
                return handle
            os.close(handle)
        except BlockingIOError:
            holder = _read(handle)
            os.close(handle)
            raise _busy(folder, holder) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in _UNSUPPORTED:
                raise
            raise UserError(
                f"the file system of {folder} cannot lock files: {error.strerror}", fix="use a local disk for --run-dir"
            ) from None


def _same_file(handle: int, path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    own = os.fstat(handle)
    return (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino)


def _unlink_if_hard_linked(handle: int, path: Path) -> bool:
    """Removes the path of a lock file that has other hard links. Returns whether it was removed. The caller must hold the lock."""
    if os.fstat(handle).st_nlink < 2:
        return False
    path.unlink()
    return True


def _write(handle: int, holder: Holder) -> None:
    """Writes a record of the lock's holder into the lock file. If the disk is full, the lock is still held, but error messages of other
    processes omit the holder."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(holder)).encode() + b"\n", 0)


def _read(handle: int) -> Holder | None:
    """Waits for the record of the lock's holder and returns it; None if the holder writes no record within 0.2 s.

    Call it only while the lock is held, because records stay in the file.
    """
    for _ in range(_READ_TRIES):
        data = os.pread(handle, 1 << 16, 0)
        with contextlib.suppress(ValueError, TypeError):
            if data.endswith(b"\n"):
                return Holder(**json.loads(data))
        time.sleep(0.01)
    return None


def _busy(folder: Path, holder: Holder | None) -> RunFolderBusy:
    if holder is None:
        return RunFolderBusy(f"{folder} is in use by another agentrl", fix="wait until it ends, or choose a different --run-dir")
    here = holder.host == socket.gethostname()
    stop = f"stop it (kill -INT {holder.pid})" if here else f"stop it there (kill -INT {holder.pid} on {holder.host})"
    return RunFolderBusy(
        f"{folder} is in use by another agentrl: process {holder.pid} on {holder.host}, since {holder.since}: {holder.command}",
        fix=f"wait until it ends, {stop}, or choose a different --run-dir",
    )


def _wait_for_parts(folder: Path, wait_s: float) -> None:
    path = folder / PARTS
    try:
        handle = _open_lock(path)
    except FileNotFoundError:
        return
    began, reported = time.monotonic(), False
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _unlink_if_hard_linked(handle, path)
                return
            except BlockingIOError:
                waited = time.monotonic() - began
            if waited > wait_s:
                pids = ", ".join(map(str, _users(path))) or "unknown"
                raise UserError(
                    f"the servers or the learner of the previous run in {folder} are still running after {wait_s:g} s (processes {pids})",
                    fix="wait, or kill them (kill -KILL), then retry",
                )
            if waited > _PATIENCE_S and not reported:
                print("waiting until the servers and the learner of the previous run exit", file=sys.stderr, flush=True)
                reported = True
            time.sleep(0.02)
    finally:
        os.close(handle)


def _users(path: Path) -> list[int]:
    """Returns the other processes that have a file open. /proc/locks lists only the process that took the lock, which is dead."""
    wanted, holders = str(path.resolve()), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has exited, or belongs to a different user
                if any(os.readlink(link) == wanted for link in (entry / "fd").iterdir()):
                    holders.append(int(entry.name))
    return holders


def _remove_if_vacant(folder: Path) -> None:
    """Removes an empty folder. Call it while the lock is held, because a process that opened the removed file then detects the change."""
    with contextlib.suppress(OSError):
        if is_vacant(folder):
            (folder / DRIVER).unlink()
            folder.rmdir()

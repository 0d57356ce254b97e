"""Leases identify driver processes, so that any process can check later whether the owner of a sandbox is still running.

A lease is `<machine>-<pid>-<start time>`, which is practically unique. `<machine>` consists of the first 4 hex digits of the boot id and
the last 5 of the pid namespace's inode, because a pid has no meaning in a different namespace, such as that of a container. Each driver
has one folder per sandbox in `<runtime>/<lease>/`, and labels its containers with the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import re
import shutil
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from agentrl.base.processes import boot_id
from agentrl.errors import SandboxError

_LEASE = re.compile(r"[0-9a-f]{9}-([0-9]{1,10})-([0-9]{1,20})")
_INITIAL_NAMESPACE = 0xEFFFFFFC  # inode of the initial pid namespace: PROC_PID_INIT_INO in Linux
_numbers = itertools.count()
_creating = threading.Lock()  # prevents the removal of a lease's folder while a folder is being created in it
_stuck: set[Path] = set()
"""Folders that could not be removed, for example because no descriptor was free. `remove_folder` retries them."""


def lease() -> str:
    """Returns this process's lease. Raises `SandboxError` if the first call fails because no descriptor is free."""
    return _lease_of(os.getpid())


@functools.cache
def _lease_of(pid: int) -> str:
    return f"{''.join(_machine())}-{pid}-{start_time(pid)}"


def alive(other: str) -> bool | None:
    """Whether the process with the lease `other` is still running; None if this process cannot determine it, because the lease belongs to a
    different pid namespace that may have processes. True if `other` is not a lease, because its owner may not be a driver of agentrl.

    Raises `SandboxError` if no descriptor is free for the check.
    """
    match = _LEASE.fullmatch(other)
    if match is None:
        return True
    boot, namespace = _machine()
    if not other.startswith(boot):
        return False
    if other.startswith(boot + namespace):
        return start_time(int(match[1])) == int(match[2])
    return None if _may_have_processes(other[len(boot) :].partition("-")[0]) else False


def sandbox_name() -> str:
    """Returns a new sandbox name, `agentrl-<lease>-<number>`, which is unique on this machine."""
    return f"agentrl-{lease()}-{next(_numbers)}"


def runtime_folder() -> Path:
    """Returns the private folder for the sockets of this user's open sandboxes, and creates it if it is missing. The path is short, because
    the length of socket paths is limited. Raises `SandboxError` if the folder cannot be created, or if other users may access or own it."""
    if os.geteuid() == 0:
        folder = Path("/run/agentrl")
    else:
        base = os.environ.get("XDG_RUNTIME_DIR")
        folder = Path(base, "agentrl") if base and Path(base).is_dir() else Path(f"/tmp/agentrl-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):  # also raised for a file, which the check below rejects
            folder.mkdir(mode=0o700)
        info = folder.lstat()
    except OSError as error:
        raise SandboxError(f"cannot create {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise SandboxError(f"{folder} must be a folder with mode 0700 that belongs to this user; correct or remove it")
    return folder


@contextlib.asynccontextmanager
async def sandbox_folder(name: str) -> AsyncIterator[Path]:
    """Creates and yields a sandbox's runtime folder, which remains after the block. If the block raises, removes the folder in a thread,
    which a second cancellation cannot stop."""
    folder = runtime_folder() / lease() / name
    with _creating:
        folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        await asyncio.to_thread(remove_folder, folder)
        raise


def write_run_label(folder: Path, backend: str, run_label: str) -> None:
    """Writes to a sandbox's folder the values that `agentrl sandbox ls` shows for the sandbox."""
    (folder / "run").write_text(f"{backend}\n{run_label}")


def read_run_label(folder: Path) -> tuple[str, str]:
    """Returns (backend, run label) from a sandbox's folder. Both values are empty while the folder is being created or removed."""
    try:
        backend, _, run_label = (folder / "run").read_text().partition("\n")
    except FileNotFoundError:
        return "", ""
    return backend, run_label


def remove_folder(folder: Path) -> None:
    """Removes a sandbox's runtime folder, and the lease's folder if it is then empty. Blocking."""
    for path in (folder, *_stuck):
        shutil.rmtree(path, ignore_errors=True)
        (_stuck.add if path.exists() else _stuck.discard)(path)
    with contextlib.suppress(OSError), _creating:
        folder.parent.rmdir()


def _machine() -> tuple[str, str]:
    """Returns the parts of a lease that identify this boot and this pid namespace. They are short, because socket paths contain leases."""
    try:
        return boot_id()[:4], _namespace_of("self")
    except OSError as error:
        raise SandboxError(f"cannot read {error.filename}: {error.strerror}") from error


def _namespace_of(pid: str) -> str:
    return f"{os.stat(f'/proc/{pid}/ns/pid').st_ino & 0xFFFFF:05x}"


def _may_have_processes(namespace: str) -> bool:
    """Whether a process may exist in a pid namespace. False only if this process sees all processes of the machine, and none is in the
    namespace. It sees all processes if it is in the initial namespace, which contains all others, and can read the namespace of every
    process, including process 1, which `hidepid` would hide."""
    if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_NAMESPACE:
        return True
    try:
        pids = [name for name in os.listdir("/proc") if name.isdecimal()]
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this process has exited, so it is not the driver
                if _namespace_of(pid) == namespace:
                    return True
    except OSError:
        return True
    return "1" not in pids


def start_time(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks after boot. None if the process does not exist or is a zombie. Raises
    `SandboxError` if /proc cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:  # a live driver must not count as dead because this process has no free descriptor
        raise SandboxError(f"cannot read the start time of process {pid}: {error.strerror}") from error
    return None if fields[0] in "ZX" else int(fields[19])

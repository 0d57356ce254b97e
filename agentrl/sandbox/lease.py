"""Who owns a sandbox: the driver process, named so that anyone on the machine can tell later whether it still lives.

A lease is `<boot>-<pid>-<start time>`: no other process, before or after, ever has the same one. Each driver keeps one folder
per sandbox in `<runtime>/<lease>/`, and marks its containers with the lease as a label.
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

from agentrl.errors import SandboxError

_LEASE = re.compile(r"[0-9a-f]{8}-([0-9]{1,10})-([0-9]{1,20})")
_numbers = itertools.count()
_making = threading.Lock()  # a lease's folder is not removed while one is made in it
_stuck: set[Path] = set()
"""Folders that could not be removed: where no descriptor is free nothing can be. Each is tried again with the next one."""


@functools.cache
def _lease_of(pid: int) -> str:
    return f"{_boot()}-{pid}-{_start_time(pid)}"


def lease() -> str:
    """This process's lease."""
    return _lease_of(os.getpid())


def alive(other: str) -> bool:
    """Whether the process that holds `other` still runs. Text that is no lease counts as alive: it is not ours to judge."""
    match = _LEASE.fullmatch(other)
    if match is None:
        return True
    return other.startswith(_boot()) and _start_time(int(match[1])) == int(match[2])


def sandbox_name() -> str:
    """A name no other sandbox of this machine has: `agentrl-<lease>-<number>`."""
    return f"agentrl-{lease()}-{next(_numbers)}"


def runtime_folder() -> Path:
    """Where drivers of this user keep sockets of open sandboxes: short, private, gone after a reboot."""
    if os.geteuid() == 0:
        folder = Path("/run/agentrl")
    else:
        base = os.environ.get("XDG_RUNTIME_DIR")
        folder = Path(base, "agentrl") if base and Path(base).is_dir() else Path(f"/tmp/agentrl-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise SandboxError(f"{folder} must be a folder of this user's own with mode 0700")
    return folder


@contextlib.asynccontextmanager
async def sandbox_folder(name: str) -> AsyncIterator[Path]:
    """Makes the runtime folder of a sandbox; removed again when the block raises, in a thread that a second cancellation does not stop."""
    folder = runtime_folder() / lease() / name
    with _making:
        folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        await asyncio.to_thread(remove_folder, folder)
        raise


def write_run_label(folder: Path, backend: str, run_label: str) -> None:
    """Notes in a sandbox's folder what `agentrl sandbox ls` shows."""
    (folder / "run").write_text(f"{backend}\n{run_label}")


def read_run_label(folder: Path) -> tuple[str, str]:
    """(backend, run label) of a sandbox's folder; empty while it is being made or removed."""
    try:
        backend, _, run_label = (folder / "run").read_text().partition("\n")
    except FileNotFoundError:
        return "", ""
    return backend, run_label


def remove_folder(folder: Path) -> None:
    """Removes a sandbox's runtime folder, and its lease's when that was the last one. Blocking: it waits for a disk."""
    for path in (folder, *_stuck):
        shutil.rmtree(path, ignore_errors=True)
        (_stuck.add if path.exists() else _stuck.discard)(path)
    with contextlib.suppress(OSError), _making:
        folder.parent.rmdir()


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which the process started; None when there is none or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if text[0] in "ZX" else int(text[19])

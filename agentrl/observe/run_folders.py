"""Finds run folders, and reads the state and the newest step of a run.

The folders may come from a third party.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path

from agentrl.base.run_lock import DRIVER
from agentrl.base.untrusted_files import open_file
from agentrl.errors import UserError
from agentrl.observe.rundata import Line, parse_object
from agentrl.observe.summary import SUMMARY_FILE, read_sessions

RUN_FILES = ("recipe.json", "run.json", "metrics.jsonl", "evaluations.json", "summary.json", "experience.sqlite", "failures/traces.sqlite")
_LAST = 256 << 10  # number of bytes at the end of metrics.jsonl that are searched for the newest step


def is_run(path: Path) -> bool:
    """Whether a folder contains a run, an evaluation or captured failures."""
    return any((path / name).is_file() for name in RUN_FILES)


def find_runs(folder: Path, *, most: int) -> list[Path]:
    """Returns at most `most` run folders in a folder, the most recently changed first.

    A link is followed only if its target is in the folder. An unreadable run folder is skipped. Raises `OSError` if the folder cannot be
    read.
    """
    root, runs = folder.resolve(), []
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            with suppress(OSError):  # removed in the meantime, or unreadable
                if entry.is_dir() and path.resolve().is_relative_to(root) and is_run(path):
                    runs.append((changed_at(path) or 0.0, path))
    return [path for _, path in sorted(runs, reverse=True)[:most]]


def check_runs_folder(path: Path) -> None:
    """Raises `UserError` if `path`, which should be a run folder or a folder of runs, does not exist."""
    if not path.is_dir():
        fix = "give a run folder, such as runs/quickstart, or the folder that contains your runs"
        raise UserError(f"there is no folder {path}", fix=fix)


def run_state(path: Path, locks: Mapping[int, Set[str]] | None = None) -> str:
    """Returns "running" if a driver runs on this machine, otherwise how the last session ended: "finished", "interrupted", "failed" or
    "killed".

    Returns "unknown" if the folder has no readable sessions.

    Args:
        locks: result of `held_locks`; None calls it.
    """
    try:
        devices = (held_locks() if locks is None else locks).get(os.lstat(path / DRIVER).st_ino)
        if devices is not None and _device(path / DRIVER) in {"", *devices}:
            return "running"
    except OSError:
        pass
    try:
        sessions = read_sessions(path)
    except (OSError, ValueError):
        return "unknown"
    return sessions[-1].ended if sessions else "unknown"


def held_locks() -> Mapping[int, Set[str]]:
    """Returns a mapping inode -> devices (see `_device`) of the files that processes on this machine have locked with flock; empty if
    /proc/locks cannot be read.

    Testing a driver's lock by acquiring it could prevent a driver from starting, so /proc/locks is read instead.
    """
    held: dict[int, set[str]] = {}
    with suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as file:
        for fields in map(str.split, file):
            if len(fields) > 5 and fields[1] == "FLOCK":
                device, _, inode = fields[5].rpartition(":")
                held.setdefault(int(inode), set()).add(device)
    return held


def _device(path: Path) -> str:
    """Returns the device of a file's mount in the format of /proc/locks, such as `fe:00`; empty if it is unknown, for example in a chroot.

    Does not use `stat`, which returns a different device on btrfs.
    """
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mount = Path(f"/proc/self/fdinfo/{handle}").read_text().partition("mnt_id:")[2].split()[0]
    finally:
        os.close(handle)
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    device = next((fields[2] for fields in mounts if fields[0] == mount), "")
    return ":".join(f"{int(part):02x}" for part in device.split(":") if part)


def last_step(path: Path) -> Line:
    """Returns the content of the newest readable line in metrics.jsonl; empty if there is none."""
    try:
        with open_file(path / "metrics.jsonl", inside=path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LAST))
            lines = file.read(_LAST).split(b"\n")[:-1]
    except (OSError, ValueError):
        return {}
    return next((data for line in reversed(lines) if (data := parse_object(line.decode("utf-8", "replace")))), {})


def changed_at(path: Path) -> float | None:
    """Returns the time at which a run last changed, in seconds since 1970; None if the folder contains none of the files that a run
    changes."""
    times = []
    for name in ("metrics.jsonl", SUMMARY_FILE, "recipe.json", "events"):
        try:
            times.append(min((path / name).stat().st_mtime, time.time()))
        except OSError:
            continue
    return max(times, default=None)

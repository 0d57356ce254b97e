"""Control groups of bubblewrap sandboxes: memory, processes and CPU time, on cgroup version 1 and 2. Root only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.sandbox import limits
from agentrl.sandbox.inside.isolation import Groups

MOUNT = Path("/sys/fs/cgroup")
_PARENT = "agentrl"
_HELPERS = 2  # bwrap and the exec server count as processes too
_REMOVE_S = 60.0


class Hierarchy:
    """The control groups of all sandboxes, each of which is identified by its sandbox's name."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def create(self, name: str, spec: SandboxSpec) -> None:
        """Creates a group with the limits of `spec`. Raises `SandboxError`."""
        try:
            self._groups.create(name, limits.group_limits(spec, _HELPERS))
        except OSError as error:
            with contextlib.suppress(SandboxError):
                self.remove(name)
            raise SandboxError(f"cannot create a control group: {error}") from error

    def add(self, name: str, pid: int) -> None:
        """Moves a process into a group."""
        self._groups.add(name, pid)

    def folders(self, name: str) -> list[Path]:
        """Folders of a group: one on version 2, one per controller on version 1."""
        return list(map(Path, self._groups.folders(name)))

    def memory_events(self, name: str) -> Path:
        """File with a line `oom_kill N`."""
        return Path(self._groups.memory_events(name))

    def names(self) -> list[str]:
        """Sandboxes of any driver that have a group, or on version 1 at least one of their folders."""
        return sorted({path.name for base in self.folders("") if base.exists() for path in base.iterdir() if path.is_dir()})

    def remove(self, name: str) -> None:
        """Kills all processes of a group and removes it. Blocking. Raises `SandboxError` if a process does not end."""
        deadline = time.monotonic() + _REMOVE_S
        while not self._groups.remove(name):
            if time.monotonic() > deadline:
                raise SandboxError(f"control group {name} still has processes after {_REMOVE_S:.0f} s")
            for folder in self.folders(name):
                _kill_all(folder)
            time.sleep(0.005)


def find_hierarchy() -> Hierarchy | None:
    """The hierarchy in which this process can limit memory, processes and CPU time; None if there is none."""
    if os.geteuid() != 0:
        return None
    groups = Groups(str(MOUNT), _PARENT)
    try:
        if groups.unified:
            _delegate(MOUNT)
        for folder in map(Path, groups.folders()):
            if not (folder.parent / "cgroup.procs").exists():
                return None
            folder.mkdir(exist_ok=True)
            if groups.unified:
                _delegate(folder)
    except OSError:  # this machine lets no control groups be created; the backend uses resource limits
        return None
    return Hierarchy(groups)


def _delegate(folder: Path) -> None:
    """Enables the controllers for the folders below. Fails with EBUSY if the machine keeps processes in `folder` itself."""
    missing = {"memory", "pids", "cpu"} - set((folder / "cgroup.subtree_control").read_text().split())
    if missing:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _kill_all(folder: Path) -> None:
    """Sends SIGKILL to every process of a group."""
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1")  # version 2, Linux 5.14
        return
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

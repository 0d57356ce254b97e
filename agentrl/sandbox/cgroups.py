"""Control groups for sandboxes that have no engine to make them: memory, processes and CPU time, on cgroup v1 and v2. Root only."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.sandbox import limits

MOUNT = Path("/sys/fs/cgroup")
PARENT = "agentrl"
PERIOD_US = 100_000
REMOVE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroup:
    """The control group of one sandbox: one folder on v2, one for each controller on v1."""

    folders: tuple[Path, ...]
    memory_events: Path  # file with a line `oom_kill N`

    def add(self, pid: int) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self, timeout_s: float = REMOVE_S) -> None:
        """Kills what still runs in the group and removes it. Blocking. Raises `SandboxError` when some process stays."""
        deadline = time.monotonic() + timeout_s
        for folder in self.folders:
            while not _removed(folder):
                _kill_all(folder)
                if time.monotonic() > deadline:
                    raise SandboxError(f"control group {folder} still has processes after {timeout_s:.0f} s")
                time.sleep(0.005)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Where groups can be made on this machine."""

    kind: Literal["v1", "v2"]

    def create(self, name: str, spec: SandboxSpec) -> ControlGroup:
        """Makes the group of sandbox `name` with the limits of `spec`. Raises `SandboxError`."""
        group = self.group(name)
        try:
            for folder in group.folders:
                folder.mkdir()
            for path, value in self._settings(name, spec):
                path.write_text(str(value))
            self._no_swap(name, spec)
            self._sockets(name, spec)
        except OSError as error:
            with contextlib.suppress(SandboxError):
                group.remove()
            raise SandboxError(f"cannot make a control group: {error}") from error
        return group

    def group(self, name: str) -> ControlGroup:
        if self.kind == "v2":
            folder = MOUNT / PARENT / name
            return ControlGroup(folders=(folder,), memory_events=folder / "memory.events")
        folders = tuple(MOUNT / controller / PARENT / name for controller in ("memory", "pids", "cpu"))
        return ControlGroup(folders=folders, memory_events=folders[0] / "memory.oom_control")

    def names(self) -> list[str]:
        """Sandboxes that have a group here, of any driver; on v1 also those that have one of the three left."""
        bases = {folder.parent for folder in self.group("any").folders}
        return sorted({path.name for base in bases if base.exists() for path in base.iterdir() if path.is_dir()})

    def _settings(self, name: str, spec: SandboxSpec) -> list[tuple[Path, object]]:
        memory, quota = spec.memory_mb << 20, int(spec.cpus * PERIOD_US)
        processes = spec.processes + 2  # bwrap and the exec server
        if self.kind == "v2":
            folder = MOUNT / PARENT / name
            return [(folder / "memory.max", memory), (folder / "pids.max", processes), (folder / "cpu.max", f"{quota} {PERIOD_US}")]
        return [
            (MOUNT / "memory" / PARENT / name / "memory.limit_in_bytes", memory),
            (MOUNT / "pids" / PARENT / name / "pids.max", processes),
            (MOUNT / "cpu" / PARENT / name / "cpu.cfs_period_us", PERIOD_US),
            (MOUNT / "cpu" / PARENT / name / "cpu.cfs_quota_us", quota),
        ]

    def _no_swap(self, name: str, spec: SandboxSpec) -> None:
        """Swap does not extend the memory limit. The files exist only where the kernel accounts swap."""
        if self.kind == "v2":
            path, value = MOUNT / PARENT / name / "memory.swap.max", 0
        else:
            path, value = MOUNT / "memory" / PARENT / name / "memory.memsw.limit_in_bytes", spec.memory_mb << 20
        if path.exists():
            path.write_text(str(value))

    def _sockets(self, name: str, spec: SandboxSpec) -> None:
        """Buffers of TCP and UDP: v2 counts them as memory, v1 apart from it and once there is a limit, where the kernel has that file."""
        path = MOUNT / "memory" / PARENT / name / "memory.kmem.tcp.limit_in_bytes"
        if self.kind == "v1" and path.exists():
            path.write_text(str(limits.socket_bytes(spec)))


def find_hierarchy() -> Hierarchy | None:
    """The hierarchy in which this process can limit memory, processes and CPU time; None when it cannot."""
    if os.geteuid() != 0:
        return None
    try:
        if (MOUNT / "cgroup.controllers").exists():
            _delegate(MOUNT)
            (MOUNT / PARENT).mkdir(exist_ok=True)
            _delegate(MOUNT / PARENT)
            return Hierarchy(kind="v2")
        for controller in ("memory", "pids", "cpu"):
            if not os.path.ismount(MOUNT / controller) and not (MOUNT / controller / "cgroup.procs").exists():
                return None
            (MOUNT / controller / PARENT).mkdir(exist_ok=True)
    except OSError:  # a machine that gives out no control groups: the caller says so and uses resource limits
        return None
    return Hierarchy(kind="v1")


def _delegate(folder: Path) -> None:
    """Lets the folders below use the controllers. Fails (EBUSY) where the machine keeps processes in `folder` itself."""
    wanted = {"memory", "pids", "cpu"} - set((folder / "cgroup.subtree_control").read_text().split())
    if wanted:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(wanted)))


def _kill_all(folder: Path) -> None:
    """Sends SIGKILL to every process of a group: by the kernel's own file where it has one (v2), else one by one."""
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1")
        return
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True

"""Computes the kernel limits of a sandbox from its spec, for all backends, and manages the control groups of bubblewrap sandboxes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import signal
import time
from pathlib import Path, PurePath
from typing import Any

from agentrl.errors import SandboxError
from agentrl.records import SandboxSpec
from agentrl.sandbox import egress, seccomp
from agentrl.sandbox.inside.isolation import PERIOD_US, Groups
from agentrl.sandbox.inside.users import HOME

MEBIBYTE = 1 << 20
RESERVED_BYTES = 48 * MEBIBYTE
"""Memory that files cannot use: enough for the exec server and for starting one program."""
INODE_BYTES = 1100
"""Kernel memory of an empty file: its inode and its name."""
WRITABLE_FOLDERS = ("/home/agent", "/tmp", "/dev/shm")
CORES_FILE = "/sys/devices/system/cpu/online"
"""The C library counts the machine's cores in this file, even if a program may run on only some of them."""
MAX_TERMINALS = 16
"""Maximum number of pseudo terminals in a sandbox. By default, a machine has 3,072 (`kernel.pty.max` minus `kernel.pty.reserve`)."""
TERMINAL_OPTIONS = f"newinstance,ptmxmode=0666,mode=0620,max={MAX_TERMINALS}"
NETWORK_SETTINGS = {
    "net.ipv4.tcp_rmem": "4096 16384 262144",
    "net.ipv4.tcp_wmem": "4096 16384 262144",
    "net.ipv4.tcp_max_tw_buckets": "4096",
}
"""Settings for a sandbox's network namespace. The buffer of a connection that is not accepted yet is not charged to any process, and stays
at the second of the three sizes."""
AGENT_USERS, SERVER_USERS = 0x70000000, 0x78000000
"""First user id of agents and of exec servers, in a range that systemd leaves free (systemd.io/UIDS-GIDS)."""

_USER_RANGE = 0x07FFFFFF
_MIN_DISK_BYTES = 4 * MEBIBYTE
_INODES_PER_MEBIBYTE = 40
_SOCKET_SHARE = 8  # TCP and UDP buffers may take 1/8 of the memory; cgroup v1 counts them in addition to the memory
_LIMITS = {"RLIMIT_NICE": 0, "RLIMIT_CORE": 0, "RLIMIT_SIGPENDING": 4096, "RLIMIT_MSGQUEUE": 262_144}
_CAPABILITIES = {"KILL": 5, "SETGID": 6, "SETUID": 7}
_CAP_SYS_RESOURCE = 24

CGROUPS = Path("/sys/fs/cgroup")
_PARENT = "agentrl"
_HELPERS = 2  # bwrap and the exec server also count as processes in a control group
_REMOVE_S = 60.0

_next_core = itertools.count()


def shared_memory_bytes(spec: SandboxSpec) -> int:
    """Returns the size of a sandbox's /dev/shm in bytes."""
    return min(16 * MEBIBYTE, spec.memory_mb * MEBIBYTE // 8)


def disk_bytes(spec: SandboxSpec) -> int:
    """Returns the size in bytes of the working directory, which is also the size of /tmp: `disk_mb`, or less so that `RESERVED_BYTES` of
    the memory remain when both folders, which are in memory, are full. The reduced size is at least 4 MiB."""
    free = spec.memory_mb * MEBIBYTE - shared_memory_bytes(spec) - len(WRITABLE_FOLDERS) * max_inodes(spec) * INODE_BYTES - RESERVED_BYTES
    return min(spec.disk_mb * MEBIBYTE, max(free // 2, _MIN_DISK_BYTES))


def max_inodes(spec: SandboxSpec) -> int:
    """Returns the maximum number of files and folders in each writable folder. Even empty files use kernel memory."""
    return _INODES_PER_MEBIBYTE * spec.memory_mb


def socket_bytes(spec: SandboxSpec) -> int:
    """Returns the maximum total size in bytes of a sandbox's TCP and UDP buffers."""
    return spec.memory_mb * MEBIBYTE // _SOCKET_SHARE


def group_limits(spec: SandboxSpec, helpers: int) -> dict[str, int]:
    """Returns the limits of a sandbox's control group, in which `helpers` processes of agentrl also run."""
    return {
        "memory": spec.memory_mb * MEBIBYTE,
        "processes": spec.processes + helpers,
        "cpu_us": int(spec.cpus * PERIOD_US),
        "sockets": socket_bytes(spec),
    }


def system_files(options: dict[str, Any]) -> dict[str, str]:
    """Returns a mapping path in the sandbox -> content of the system files that describe the sandbox to its programs."""
    agent = options["agent"]
    passwd = (
        f"root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{agent}:{agent}:agent:{HOME}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    return {"/etc/passwd": passwd, CORES_FILE: ",".join(map(str, options["cores"])) + "\n"}


def write_system_files(folder: Path, options: dict[str, Any]) -> dict[str, Path]:
    """Writes the files of `system_files` to `folder`. Returns a mapping path in the sandbox -> path on the host."""
    written = {}
    for path, text in system_files(options).items():
        written[path] = folder / PurePath(path).name
        written[path].write_text(text)
    return written


def cores(spec: SandboxSpec) -> list[int]:
    """Returns the cores for one sandbox, at most `ceil(spec.cpus)`. Successive calls rotate through the cores that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    count = min(len(usable), math.ceil(spec.cpus))
    first = next(_next_core) * count
    return sorted(usable[(first + number) % len(usable)] for number in range(count))


@functools.cache
def server_capabilities() -> dict[str, int]:
    """Returns a mapping name -> number of the capabilities that the exec server keeps.

    The exec server needs these capabilities to kill programs of a different user and to become that user. With SYS_RESOURCE, the exec
    server ensures that the kernel kills programs before the exec server when memory runs out. SYS_RESOURCE is included only if this process
    may have it, because some machines withhold it.
    """
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    available = int(status["CapBnd"], 16) >> _CAP_SYS_RESOURCE & 1
    return _CAPABILITIES | ({"SYS_RESOURCE": _CAP_SYS_RESOURCE} if available else {})


def server_options(name: str, spec: SandboxSpec, *, grouped: bool = True) -> dict[str, Any]:
    """Returns the start options for the exec server of sandbox `name`. `grouped`: whether the sandbox has a control group for CPU time.

    Each sandbox has two user ids, because the kernel counts inotify instances, queued signals and bytes in queues and pipes per user. The
    ids are derived from a hash of the name. If the ids of two sandboxes collide, the sandboxes share those counts, and
    `SandboxProcesses.kill_programs` for one of them kills the programs of both.
    """
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _USER_RANGE
    return {
        "agent": AGENT_USERS + number,
        "server": SERVER_USERS + number,
        "rights": list(server_capabilities().values()),
        "cores": cores(spec),
        "open_files": spec.open_files,
        "grouped": grouped,
        "limits": dict(_LIMITS),
        "filter": seccomp.filter_program().hex() if seccomp.supported() else "",
    } | egress.server_options(spec)


# Control groups -------------------------------------------------------------------------------------------------------


class ControlGroups(Groups):
    """The control groups of all bubblewrap sandboxes, which limit memory, processes and CPU time. Supports cgroup versions 1 and 2.
    Requires root."""

    def confine(self, name: str, spec: SandboxSpec, pid: int) -> None:
        """Moves a process into a new group with the limits of `spec`. Raises `SandboxError` if the group cannot be created, and `OSError`
        if the process cannot be moved."""
        try:
            self.create(name, group_limits(spec, _HELPERS))
        except OSError as error:
            with contextlib.suppress(SandboxError):
                self.end(name)
            raise SandboxError(f"cannot create a control group: {error}") from error
        self.add(name, pid)

    def names(self) -> list[str]:
        """Returns the names of all sandboxes, of any driver, that have a group (on version 1: at least one of its folders)."""
        return sorted({path.name for base in map(Path, self.folders()) if base.exists() for path in base.iterdir() if path.is_dir()})

    def end(self, name: str) -> None:
        """Kills all processes in a group and removes the group. Blocking. Raises `SandboxError` if a process does not exit."""
        deadline = time.monotonic() + _REMOVE_S
        while not self.remove(name):
            if time.monotonic() > deadline:
                raise SandboxError(f"control group {name} still has processes after {_REMOVE_S:.0f} s")
            for folder in self.folders(name):
                _kill_all(Path(folder))
            time.sleep(0.005)


def find_control_groups() -> ControlGroups | None:
    """Returns the control groups in which this process can limit memory, processes and CPU time, or None if this process cannot create
    them."""
    if os.geteuid() != 0:
        return None
    groups = ControlGroups(str(CGROUPS), _PARENT)
    try:
        if groups.unified:
            _delegate(CGROUPS)
        for folder in map(Path, groups.folders()):
            if not (folder.parent / "cgroup.procs").exists():
                return None
            folder.mkdir(exist_ok=True)
            if groups.unified:
                _delegate(folder)
    except OSError:  # control groups cannot be created on this machine; the backend uses resource limits
        return None
    return groups


def _delegate(folder: Path) -> None:
    """Enables the controllers in the folders below `folder`. Fails with EBUSY if `folder` itself contains processes."""
    missing = {"memory", "pids", "cpu"} - set((folder / "cgroup.subtree_control").read_text().split())
    if missing:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _kill_all(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1")  # version 2, Linux 5.14
        return
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

"""A sandbox spec turned into what the kernel is told: the same numbers for every backend."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from pathlib import Path, PurePath
from typing import Any

from agentrl.records import SandboxSpec
from agentrl.sandbox import egress, seccomp
from agentrl.sandbox.inside.users import HOME

MEBIBYTE = 1 << 20
RESERVED_BYTES = 48 * MEBIBYTE
"""Memory that files never take: the exec server and the start of one program fit in it."""
SMALLEST_DISK = 4 * MEBIBYTE
INODES_PER_MEBIBYTE = 40
INODE_BYTES = 1100
"""Kernel memory of an empty file: its inode and its name."""
WRITABLE_FOLDERS = ("/home/agent", "/tmp", "/dev/shm")
AGENT_USERS, SERVER_USERS, USERS = 0x70000000, 0x78000000, 0x07FFFFFF
"""User ids of agents and of exec servers, from a range that systemd's table of ids keeps free (systemd.io/UIDS-GIDS)."""
CORES_FILE = "/sys/devices/system/cpu/online"
"""Where the C library counts cores, whatever cores a program may run on."""
QUEUED_SIGNALS, QUEUE_BYTES = 4096, 262_144
SOCKET_SHARE = 8
"""What TCP and UDP hold in buffers may be this part of a sandbox's memory, and comes on top where the kernel counts it apart (v1)."""
MAX_TERMINALS = 16
"""Pseudo terminals of a sandbox. The machine has 3,072 for all (`kernel.pty.max` without `kernel.pty.reserve`)."""
TERMINAL_OPTIONS = f"newinstance,ptmxmode=0666,mode=0620,max={MAX_TERMINALS}"
NETWORK_SETTINGS = {
    "net.ipv4.tcp_rmem": "4096 16384 262144",
    "net.ipv4.tcp_wmem": "4096 16384 262144",
    "net.ipv4.tcp_max_tw_buckets": "4096",
}
"""Of a sandbox's own network namespace. A connection that nobody has accepted yet is charged to nobody, and keeps to the second size."""

CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_RESOURCE = 5, 6, 7, 24

_turns = itertools.count()


def shared_memory_bytes(spec: SandboxSpec) -> int:
    """Size of /dev/shm."""
    return min(16 * MEBIBYTE, spec.memory_mb * MEBIBYTE // 8)


def disk_bytes(spec: SandboxSpec) -> int:
    """Size of the working directory, and of /tmp. They are memory, so that both full must leave room to go on."""
    room = (
        spec.memory_mb * MEBIBYTE - shared_memory_bytes(spec) - len(WRITABLE_FOLDERS) * max_inodes(spec) * INODE_BYTES - RESERVED_BYTES
    ) // 2
    return min(spec.disk_mb * MEBIBYTE, max(room, SMALLEST_DISK))


def max_inodes(spec: SandboxSpec) -> int:
    """Files and folders that each of the writable folders may hold: an empty one still takes kernel memory."""
    return INODES_PER_MEBIBYTE * spec.memory_mb


def socket_bytes(spec: SandboxSpec) -> int:
    """Buffers of TCP and UDP together."""
    return spec.memory_mb * MEBIBYTE // SOCKET_SHARE


def system_files(options: dict[str, Any]) -> dict[str, str]:
    """The files that tell programs who they are and what they have: path in the sandbox -> content."""
    agent, home = options["agent"], HOME
    passwd = (
        f"root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{agent}:{agent}:agent:{home}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    return {"/etc/passwd": passwd, CORES_FILE: ",".join(map(str, options["cores"])) + "\n"}


def write_system_files(folder: Path, options: dict[str, Any]) -> dict[str, Path]:
    """Writes the files of `system_files` to `folder`; gives where in the sandbox each is shown."""
    shown = {}
    for path, text in system_files(options).items():
        shown[path] = folder / PurePath(path).name
        shown[path].write_text(text)
    return shown


def cores(spec: SandboxSpec) -> list[int]:
    """The cores of one sandbox, as many as its CPU time fills: the next ones in turn of those that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    count = min(len(usable), math.ceil(spec.cpus))
    first = next(_turns) * count
    return sorted(usable[(first + number) % len(usable)] for number in range(count))


@functools.cache
def server_capabilities() -> dict[str, int]:
    """Capabilities (name -> number) that the exec server keeps: to end programs of another user, and to become that user.

    With SYS_RESOURCE a program cannot make itself a less likely victim than the server when memory runs out. Some machines do
    not have it to give; it is asked for where this process could have it.
    """
    rights = {"KILL": CAP_KILL, "SETGID": CAP_SETGID, "SETUID": CAP_SETUID}
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return rights | ({"SYS_RESOURCE": CAP_SYS_RESOURCE} if int(status["CapBnd"], 16) >> CAP_SYS_RESOURCE & 1 else {})


def server_options(name: str, spec: SandboxSpec, *, grouped: bool = True) -> dict[str, Any]:
    """The start options of the exec server of sandbox `name`; `grouped` if the sandbox has a control group for CPU time.

    The users belong to this sandbox alone, because the kernel counts some things for each user of the machine: inotify
    instances, queued signals, bytes in queues and pipes. A hash of the name is enough: should two ever meet, they share a count.
    """
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % USERS
    return {
        "agent": AGENT_USERS + number,
        "server": SERVER_USERS + number,
        "rights": list(server_capabilities().values()),
        "cores": cores(spec),
        "open_files": spec.open_files,
        "grouped": grouped,
        "limits": {"RLIMIT_NICE": 0, "RLIMIT_CORE": 0, "RLIMIT_SIGPENDING": QUEUED_SIGNALS, "RLIMIT_MSGQUEUE": QUEUE_BYTES},
        "filter": seccomp.filter_program().hex() if seccomp.supported() else "",
    } | egress.server_options(spec)

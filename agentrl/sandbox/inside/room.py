"""A sandbox of its own inside a shared container: namespaces, a control group and a file tree, made by the process they are for.

The process has been forked by the keeper (see `keeper`), is the first of a new pid namespace, and still has the container's rights.
It makes the rest, hides the container's tree behind its own, and goes on as an exec server, which gives those rights up. Nothing that
somebody else can write to is read on the way, and no program of anybody's runs before the rights are gone.

The tree is the image's through an overlay of the sandbox's own, and its devices are its own: what the kernel keeps for an inode (locks
of files, pipes, who watches a folder) is then shared with no other sandbox. `pivot_root` is refused by the daemon's filter, so the tree
is moved over the old one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import stat
import struct

from agentrl.sandbox.inside.bounds import MS_BIND, MS_NOEXEC, MS_RDONLY
from agentrl.sandbox.inside.users import HOME, LIBC, MS_NODEV, MS_NOSUID, MS_REMOUNT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.wire import Request

CLONE_NEWPID = 0x20000000
NAMESPACES = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "network": 0x40000000}
MS_MOVE, MS_REC, MS_PRIVATE, MNT_DETACH = 0x2000, 0x4000, 0x40000, 2
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
INTERFACE = struct.Struct("16sh22x")
PLAIN = MS_NOSUID | MS_NODEV
CONTROLLERS = "/sys/fs/cgroup"
WORKSHOP = "/tmp"
"""Of the container, and empty there: where a sandbox's tree is put together, in a mount namespace of its own."""
TREE = f"{WORKSHOP}/tree"
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
PROC_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
PROC_HIDDEN = ("acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats")
PERIOD_US = 100_000


class Groups:
    """Control groups below the container's own, one for each sandbox. Raises `OSError` where the container may make none."""

    def __init__(self, top: str = CONTROLLERS) -> None:
        self.top = top
        self.unified = os.path.exists(f"{top}/cgroup.controllers")
        self.folders = [top] if self.unified else [f"{top}/{name}" for name in ("memory", "pids", "cpu")]

    def open_up(self) -> None:
        """Makes groups possible: the runtime mounts them read-only, and version 2 wants no process beside the groups."""
        for folder in self.folders:
            mount(None, folder, None, MS_REMOUNT | MS_BIND | PLAIN | MS_NOEXEC)
        if self.unified:
            os.mkdir(f"{self.top}/keeper")
            put(f"{self.top}/keeper/cgroup.procs", 0)
            put(f"{self.top}/cgroup.subtree_control", "+memory +pids +cpu")

    def enter(self, name: str, bounds: Request) -> None:
        """Makes the group of sandbox `name` and puts this process into it."""
        for folder in self.folders:
            os.mkdir(f"{folder}/{name}")
        for file, value in self.settings(bounds):
            put(f"{self.top}/{file.format(name)}", value)
        for file, value in self.settings_where_known(bounds):
            path = f"{self.top}/{file.format(name)}"
            if os.path.exists(path):
                put(path, value)
        for folder in self.folders:
            put(f"{folder}/{name}/cgroup.procs", 0)

    def settings(self, bounds: Request) -> list[tuple[str, object]]:
        """File and value of each limit; in a file's name {} stands for the sandbox's."""
        memory, processes, quota = bounds["memory"], bounds["processes"], bounds["cpu_us"]
        if self.unified:
            return [("{}/memory.max", memory), ("{}/pids.max", processes), ("{}/cpu.max", f"{quota} {PERIOD_US}")]
        return [
            ("memory/{}/memory.limit_in_bytes", memory),
            ("pids/{}/pids.max", processes),
            ("cpu/{}/cpu.cfs_period_us", PERIOD_US),
            ("cpu/{}/cpu.cfs_quota_us", quota),
        ]

    def settings_where_known(self, bounds: Request) -> list[tuple[str, object]]:
        """Swap, and buffers of sockets: files that only some kernels have."""
        if self.unified:
            return [("{}/memory.swap.max", 0)]
        return [
            ("memory/{}/memory.memsw.limit_in_bytes", bounds["memory"]),
            ("memory/{}/memory.kmem.tcp.limit_in_bytes", bounds["sockets"]),
        ]

    def memory_events(self, name: str) -> str:
        """File with a line `oom_kill N`."""
        return f"{self.top}/{name}/memory.events" if self.unified else f"{self.top}/memory/{name}/memory.oom_control"

    def remove(self, name: str) -> bool:
        """Whether the group is gone; it is not while the kernel still counts a process in it."""
        left = False
        for folder in self.folders:
            try:
                os.rmdir(f"{folder}/{name}")
            except FileNotFoundError:
                pass
            except OSError:
                left = True
        return not left


def put(path: str, value: object) -> None:
    with open(path, "w") as file:
        file.write(str(value))


def last_error(doing: str) -> OSError:
    """The error of the C library's last call."""
    code = ctypes.get_errno()
    return OSError(code, f"{doing}: {os.strerror(code)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, settings: str = "") -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    if LIBC.mount(*words, flags, settings.encode() or None) != 0:
        raise last_error(f"mount of {kind or source or 'flags'} on {target}")


def leave_namespaces(names: list[str]) -> None:
    """Takes this process into new namespaces of these kinds."""
    flags = 0
    for name in names:
        flags |= NAMESPACES[name]
    if LIBC.unshare(flags) != 0:
        raise last_error(f"new namespaces {names}")


def move_in(room: Request, groups: Groups, program: bytes) -> None:
    """Makes the sandbox that `room` describes around this process. Raises `OSError`."""
    groups.enter(room["name"], room["bounds"])
    leave_namespaces(room["namespaces"])
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", WORKSHOP, "tmpfs", PLAIN, "size=65536,mode=0755")
    os.mkdir(TREE)
    os.mkdir(f"{WORKSHOP}/empty")
    mount("image", TREE, "overlay", MS_RDONLY | PLAIN, f"lowerdir={WORKSHOP}/empty:/")
    put_up_files(room, groups, program)
    put_up_devices(room)
    put_up_processes(room)
    for path, settings in room["tmpfs"].items():
        mount("tmpfs", TREE + path, "tmpfs", PLAIN, settings)
    mount(None, f"{TREE}/dev", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    if "uts" in room["namespaces"]:
        socket.sethostname("sandbox")
    if "network" in room["namespaces"]:
        raise_loopback()
    hide_the_container()


def put_up_files(room: Request, groups: Groups, program: bytes) -> None:
    """/agentrl with what is this sandbox's alone, some of it shown over the image's files, and the cores in /sys. All read-only."""
    own = f"{TREE}/agentrl"
    mount(room["name"], own, "tmpfs", PLAIN, f"size={(1 << 17) + len(program)},mode=0755")
    for number, (path, text) in enumerate(room["files"].items()):
        put(f"{own}/{number}", text)
        if path.startswith("/sys/"):
            mount("tmpfs", f"{TREE}/sys", "tmpfs", PLAIN | MS_NOEXEC, "size=65536,mode=0755")
            os.makedirs(os.path.dirname(TREE + path))
            put(TREE + path, "")
        mount(f"{own}/{number}", TREE + path, None, MS_BIND)
        mount(None, TREE + path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | PLAIN | MS_NOEXEC)
        if path.startswith("/sys/"):
            mount(None, f"{TREE}/sys", None, MS_REMOUNT | MS_BIND | MS_RDONLY | PLAIN | MS_NOEXEC)
    put(f"{own}/memory", "")
    mount(groups.memory_events(room["name"]), f"{own}/memory", None, MS_BIND)
    mount(None, f"{own}/memory", None, MS_REMOUNT | MS_BIND | MS_RDONLY | PLAIN | MS_NOEXEC)
    if program:
        with open(f"{own}/exec_server.py", "wb") as file:
            file.write(program)
    mount(None, own, None, MS_REMOUNT | MS_BIND | MS_RDONLY | PLAIN)


def put_up_devices(room: Request) -> None:
    """The harmless devices, whose inodes are this sandbox's alone, and pseudo terminals of its own."""
    mount("tmpfs", f"{TREE}/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=65536,mode=0755")
    for name, (major, minor) in DEVICES.items():
        if LIBC.mknod(f"{TREE}/dev/{name}".encode(), stat.S_IFCHR, ctypes.c_ulong(os.makedev(major, minor))) != 0:
            raise last_error(f"device {name}")
        os.chmod(f"{TREE}/dev/{name}", 0o666)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"{TREE}/dev/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{TREE}/dev/{name}")
    mount("devpts", f"{TREE}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, room["terminals"])


def put_up_processes(room: Request) -> None:
    """/proc of the new pid namespace; what speaks of the machine is hidden or read-only, as daemons have it. Sets what is the network's."""
    top, flags = f"{TREE}/proc", PLAIN | MS_NOEXEC
    mount("proc", top, "proc", flags)
    for name, value in room["settings"].items():
        put(f"{top}/sys/{name.replace('.', '/')}", value)
    for path in (f"{top}/{name}" for name in PROC_READ_ONLY):
        if os.path.exists(path):
            mount(path, path, None, MS_BIND)
            mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    for path in (f"{top}/{name}" for name in PROC_HIDDEN):
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_RDONLY | flags, "size=4096")
        elif os.path.exists(path):
            mount(f"{TREE}/dev/null", path, None, MS_BIND)
            mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        _, flags = INTERFACE.unpack(fcntl.ioctl(sock, SIOCGIFFLAGS, INTERFACE.pack(b"lo", 0)))
        fcntl.ioctl(sock, SIOCSIFFLAGS, INTERFACE.pack(b"lo", flags | IFF_UP))


def hide_the_container() -> None:
    """Puts the new tree over the old one, of which nothing but the image is left under it."""
    for path in ("/agentrl", "/sys", "/proc", HOME):
        if LIBC.umount2(path.encode(), MNT_DETACH) != 0:
            raise last_error(f"unmounting {path}")
    os.chdir(TREE)
    mount(".", "/", None, MS_MOVE)
    os.chroot(".")
    os.chdir("/")

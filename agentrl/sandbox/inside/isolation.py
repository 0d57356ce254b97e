"""Isolates one sandbox. The first process of the sandbox sets up the control group, namespaces and file tree.

In a shared container, the keeper forks this process into a new pid namespace, with the container's rights. The process builds the sandbox
and continues as an exec server, which gives up those rights. Until then, the process reads nothing that other processes can write, and no
program runs in the sandbox.

The file tree is an overlay of the image, with new device files. So sandboxes do not share inodes, file locks, pipes or inotify watches.
Docker's system call filter refuses `pivot_root`, so the new tree is moved over the old tree.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import stat
import struct
import sys

from agentrl.sandbox.inside.users import HOME, LIBC, MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, MS_REMOUNT, last_error, mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.wire import Request

CLONE_NEWPID = 0x20000000
NAMESPACES = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "network": 0x40000000}
PERIOD_US = 100_000
_MS_MOVE, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x2000, 0x4000, 0x40000, 2
_PLAIN = MS_NOSUID | MS_NODEV
_READ_ONLY = MS_REMOUNT | MS_BIND | MS_RDONLY | _PLAIN | MS_NOEXEC
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_INTERFACE = struct.Struct("16sh22x")
_WORKSHOP = "/tmp"  # empty in a container; a tmpfs here, in the sandbox's mount namespace, holds the new tree
_TREE = f"{_WORKSHOP}/tree"
_OWN = ("/proc", "/sys", "/agentrl", HOME)  # mounts that a bubblewrap sandbox does not share with others
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_PROC_HIDDEN = ("acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats")


class Groups:
    """Control groups of sandboxes, in the folder `parent` of the cgroup tree at `top`, on version 1 or 2."""

    def __init__(self, top: str = "/sys/fs/cgroup", parent: str = "") -> None:
        self.top, self.parent = top, parent
        self.unified = os.path.exists(f"{top}/cgroup.controllers")

    def folder(self, controller: str, name: str = "") -> str:
        """Returns the folder of the group `name` in the hierarchy of `controller`."""
        return os.path.join(self.top, "" if self.unified else controller, self.parent, name)

    def folders(self, name: str = "") -> list[str]:
        """Returns all folders of the group `name`: one on version 2, one per controller on version 1."""
        return [self.folder(controller, name) for controller in (("memory",) if self.unified else ("memory", "pids", "cpu"))]

    def open_up(self) -> None:
        """Makes the control groups of a container writable, because runtimes mount them read-only. On version 2, also moves this process to
        a subgroup. Raises `OSError`."""
        for folder in self.folders():
            mount(None, folder, None, MS_REMOUNT | MS_BIND | _PLAIN | MS_NOEXEC)
        if self.unified:
            os.mkdir(f"{self.top}/keeper")
            _write(f"{self.top}/keeper/cgroup.procs", 0)
            _write(f"{self.top}/cgroup.subtree_control", "+memory +pids +cpu")

    def create(self, name: str, bounds: Request) -> None:
        """Creates the group `name` with the limits `bounds`. Raises `OSError` on failure, which may leave part of the group."""
        for folder in self.folders(name):
            os.mkdir(folder)
        for controller, file, value, required in self._settings(bounds):
            path = f"{self.folder(controller, name)}/{file}"
            if required or os.path.exists(path):
                _write(path, value)

    def add(self, name: str, pid: int = 0) -> None:
        """Moves a process, this one by default, to the group `name`. Raises `OSError` if the process has exited."""
        for folder in self.folders(name):
            _write(f"{folder}/cgroup.procs", pid)

    def _settings(self, bounds: Request) -> list[tuple[str, str, object, bool]]:
        """Returns (controller, file, value, whether every kernel has the file) for each limit."""
        memory, processes, quota = bounds["memory"], bounds["processes"], bounds["cpu_us"]
        if self.unified:
            return [
                ("memory", "memory.max", memory, True),
                ("memory", "memory.swap.max", 0, False),
                ("pids", "pids.max", processes, True),
                ("cpu", "cpu.max", f"{quota} {PERIOD_US}", True),
            ]
        return [
            ("memory", "memory.limit_in_bytes", memory, True),
            ("memory", "memory.memsw.limit_in_bytes", memory, False),
            ("memory", "memory.kmem.tcp.limit_in_bytes", bounds["sockets"], False),
            ("pids", "pids.max", processes, True),
            ("cpu", "cpu.cfs_period_us", PERIOD_US, True),
            ("cpu", "cpu.cfs_quota_us", quota, True),
        ]

    def memory_events(self, name: str) -> str:
        """Returns the path of the file whose line `oom_kill N` counts the out-of-memory kills in the group `name`."""
        return f"{self.folder('memory', name)}/{'memory.events' if self.unified else 'memory.oom_control'}"

    def remove(self, name: str) -> bool:
        """Removes the group `name`. Returns False while the kernel still counts a process in the group."""
        removed = True
        for folder in self.folders(name):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                removed = False
        return removed


def _write(path: str, value: object) -> None:
    with open(path, "w") as file:
        file.write(str(value))


def isolate(sandbox: Request, groups: Groups, program: bytes) -> None:
    """Isolates this process in the sandbox that `sandbox` describes. Raises `OSError` on failure."""
    name, namespaces = sandbox["name"], sandbox["namespaces"]
    groups.create(name, sandbox["bounds"])
    groups.add(name)
    flags = 0
    for namespace in namespaces:
        flags |= NAMESPACES[namespace]
    if LIBC.unshare(flags) != 0:
        raise last_error(f"new namespaces {namespaces}")
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _build_tree(sandbox)
    _add_files(sandbox, groups, program)
    _add_proc(sandbox)
    for path, settings in sandbox["tmpfs"].items():
        mount("tmpfs", _TREE + path, "tmpfs", _PLAIN, settings)
    mount(None, f"{_TREE}/dev", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    if "uts" in namespaces:
        socket.sethostname("sandbox")
    if "network" in namespaces:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            _, up = _INTERFACE.unpack(fcntl.ioctl(sock, _SIOCGIFFLAGS, _INTERFACE.pack(b"lo", 0)))
            fcntl.ioctl(sock, _SIOCSIFFLAGS, _INTERFACE.pack(b"lo", up | _IFF_UP))
    _enter_tree(("/agentrl", "/sys", "/proc", HOME))


def isolate_tree(options: Request) -> None:
    """Replaces the root of a bubblewrap sandbox with a separate tree. Raises `OSError`, whose message names the mount that failed.

    With bwrap, all sandboxes see the same inodes of the image and of the host's devices, and a process that can read a file can watch
    it with inotify. Mounts that already belong to this sandbox, such as its tmpfs, are moved to the new tree.
    """
    if sys.argv[0].endswith(".pyc"):  # all sandboxes of an image start from this file, which is already in memory
        _unmount(sys.argv[0])
    scratch = os.open(_WORKSHOP, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _build_tree(options)
    mount("/dev/shm", f"{_TREE}/dev/shm", None, MS_BIND)
    mount(None, f"{_TREE}/dev", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    mount(f"/proc/self/fd/{scratch}", _TREE + _WORKSHOP, None, MS_BIND)
    os.close(scratch)
    for path in (*_OWN, *options["shown"]):
        mount(path, _TREE + path, None, MS_BIND | _MS_REC)
    _enter_tree(_OWN)


def _build_tree(description: Request) -> None:
    """Mounts an overlay of the image at `_TREE`, with new devices and pseudo terminals."""
    mount("tmpfs", _WORKSHOP, "tmpfs", _PLAIN, "size=65536,mode=0755")
    os.mkdir(_TREE)
    os.mkdir(f"{_WORKSHOP}/empty")
    mount("image", _TREE, "overlay", MS_RDONLY | _PLAIN, f"lowerdir={_WORKSHOP}/empty:/")
    mount("tmpfs", f"{_TREE}/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=65536,mode=0755")
    for name, (major, minor) in _DEVICES.items():
        if LIBC.mknod(f"{_TREE}/dev/{name}".encode(), stat.S_IFCHR, ctypes.c_ulong(os.makedev(major, minor))) != 0:
            raise last_error(f"device {name}")
        os.chmod(f"{_TREE}/dev/{name}", 0o666)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{_TREE}/dev/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{_TREE}/dev/{name}")
    mount("devpts", f"{_TREE}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, description["terminals"])


def _add_files(sandbox: Request, groups: Groups, program: bytes) -> None:
    """Adds /agentrl with the files of this sandbox. Some of these files replace files in the image or in /sys. All files in /agentrl are
    read-only."""
    own = f"{_TREE}/agentrl"
    mount(sandbox["name"], own, "tmpfs", _PLAIN, f"size={(1 << 17) + len(program)},mode=0755")
    for number, (path, text) in enumerate(sandbox["files"].items()):
        _write(f"{own}/{number}", text)
        if path.startswith("/sys/"):
            mount("tmpfs", f"{_TREE}/sys", "tmpfs", _PLAIN | MS_NOEXEC, "size=65536,mode=0755")
            os.makedirs(os.path.dirname(_TREE + path))
            _write(_TREE + path, "")
        mount(f"{own}/{number}", _TREE + path, None, MS_BIND)
        mount(None, _TREE + path, None, _READ_ONLY)
        if path.startswith("/sys/"):
            mount(None, f"{_TREE}/sys", None, _READ_ONLY)
    _write(f"{own}/memory", "")
    mount(groups.memory_events(sandbox["name"]), f"{own}/memory", None, MS_BIND)
    mount(None, f"{own}/memory", None, _READ_ONLY)
    if program:
        with open(f"{own}/exec_server.py", "wb") as file:
            file.write(program)
    mount(None, own, None, MS_REMOUNT | MS_BIND | MS_RDONLY | _PLAIN)


def _add_proc(sandbox: Request) -> None:
    """Adds the new pid namespace's /proc. Writes the network settings. Hides machine-wide entries or makes them read-only, as container
    daemons do."""
    top = f"{_TREE}/proc"
    mount("proc", top, "proc", _PLAIN | MS_NOEXEC)
    for name, value in sandbox["settings"].items():
        _write(f"{top}/sys/{name.replace('.', '/')}", value)
    for path in (f"{top}/{name}" for name in _PROC_READ_ONLY):
        if os.path.exists(path):
            mount(path, path, None, MS_BIND)
            mount(None, path, None, _READ_ONLY)
    for path in (f"{top}/{name}" for name in _PROC_HIDDEN):
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_RDONLY | _PLAIN | MS_NOEXEC, "size=4096")
        elif os.path.exists(path):
            mount(f"{_TREE}/dev/null", path, None, MS_BIND)
            mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)


def _enter_tree(old_mounts: tuple[str, ...]) -> None:
    """Unmounts `old_mounts`, so that only the image is left of the old tree, and moves the new tree over the image."""
    for path in old_mounts:
        _unmount(path)
    os.chdir(_TREE)
    mount(".", "/", None, _MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def _unmount(path: str) -> None:
    if LIBC.umount2(path.encode(), _MNT_DETACH) != 0:
        raise last_error(f"unmounting {path}")

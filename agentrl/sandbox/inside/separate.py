"""A separate file tree for each bubblewrap sandbox.

bwrap shows every sandbox the same inodes of the image and of the host's devices, and a process that can read a file can watch it with
inotify. So the exec server, while it is root, replaces them with an overlay of the image and new devices, as `room` does in a shared
container. Mounts that already belong to this sandbox, such as its tmpfs, are moved to the new tree.
"""

from __future__ import annotations

import os
import sys

from agentrl.sandbox.inside.bounds import MS_BIND, MS_NOEXEC, MS_RDONLY
from agentrl.sandbox.inside.room import MNT_DETACH, MS_MOVE, MS_REC, PLAIN, TREE, WORKSHOP, last_error, mount, put_up_devices
from agentrl.sandbox.inside.users import HOME, LIBC, MS_NOSUID, MS_REMOUNT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentrl.sandbox.inside.wire import Request

OWN = ("/proc", "/sys", "/agentrl", HOME)
"""Mounts that belong only to this sandbox, with those below them."""


def separate(options: Request) -> None:
    """Replaces the root of this process, the first of its sandbox, with a separate tree. Raises `OSError` with the mount."""
    if sys.argv[0].endswith(".pyc"):  # all sandboxes of an image start from one file, which is in memory by now
        detach(sys.argv[0])
    scratch = os.open(WORKSHOP, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    mount("tmpfs", WORKSHOP, "tmpfs", PLAIN, "size=65536,mode=0755")
    os.mkdir(TREE)
    os.mkdir(f"{WORKSHOP}/empty")
    mount("image", TREE, "overlay", MS_RDONLY | PLAIN, f"lowerdir={WORKSHOP}/empty:/")
    put_up_devices(options)
    mount("/dev/shm", f"{TREE}/dev/shm", None, MS_BIND)
    mount(None, f"{TREE}/dev", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    mount(f"/proc/self/fd/{scratch}", TREE + WORKSHOP, None, MS_BIND)
    os.close(scratch)
    for path in (*OWN, *options["shown"]):
        mount(path, TREE + path, None, MS_BIND | MS_REC)
    for path in OWN:
        detach(path)
    os.chdir(TREE)
    mount(".", "/", None, MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def detach(path: str) -> None:
    if LIBC.umount2(path.encode(), MNT_DETACH) != 0:
        raise last_error(f"unmounting {path}")

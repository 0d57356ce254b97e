"""Uses of CAP_SYS_ADMIN: mounting, remounting, moving the root, new namespaces, joining old ones.

kind: escape
seconds: 10
"""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
done = []
for kind in (b"tmpfs", b"proc", b"sysfs", b"cgroup", b"cgroup2", b"overlay", b"devtmpfs", b"mqueue", b"bpf", b"fuse", b"debugfs"):
    if libc.mount(b"none", b"/tmp", kind, 0, b"") == 0:
        done.append("mount " + kind.decode())
for path in (b"/", b"/proc", b"/proc/sys", b"/sys", b"/agentrl", b"/usr"):
    if libc.mount(None, path, None, 32 | 4096, None) == 0 or libc.mount(None, path, None, 32, None) == 0:
        done.append("remount " + path.decode())
    if libc.umount2(path, 2) == 0:
        done.append("umount " + path.decode())
if libc.mount(b"/", b"/tmp", None, 4096 | 16384, None) == 0:
    done.append("bind")
for name in ("chroot", "pivot_root"):
    if getattr(libc, name, libc.chroot)(b"/tmp", b"/tmp") == 0:
        done.append(name)
for number in (428, 429, 430, 431, 432, 433, 442, 467):
    if libc.syscall(number, -100, b"/", 1, 0, 0, 0) >= 0:
        done.append(f"call {number}")
for name in ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup"):
    for pid in (1, os.getpid()):
        try:
            if libc.setns(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), 0) == 0:
                done.append("setns " + name)
        except OSError:
            continue
print(f"ESCAPED: {', '.join(done)}" if done else "held: all refused")

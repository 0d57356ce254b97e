"""Opens and makes device files: disks, memory, ports, loop devices, /dev/kvm, /dev/fuse.

kind: escape
seconds: 10
"""

import os
import stat

harmless = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"}
done = []
for folder, _, files in os.walk("/dev"):
    for name in files:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if (stat.S_ISBLK(mode) or stat.S_ISCHR(mode)) and name not in harmless and not folder.startswith("/dev/pts"):
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                done.append(path)
            except OSError:
                continue
devices = {"mem": (1, 1), "kmsg": (1, 11), "vda": (254, 0), "sda": (8, 0), "loop0": (7, 0), "kvm": (10, 232), "fuse": (10, 229)}
for name, (major, minor) in devices.items():
    for kind in (stat.S_IFBLK, stat.S_IFCHR):
        try:
            os.mknod(f"/tmp/{name}", 0o600 | kind, os.makedev(major, minor))
            done.append("made " + name)
        except OSError:
            continue
print(f"ESCAPED: {done}" if done else "held: no device of use")

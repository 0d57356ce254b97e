"""Makes a user namespace to be root in, by every call that can.

kind: escape
seconds: 10
"""

import ctypes
import os
import struct
import subprocess

libc = ctypes.CDLL(None, use_errno=True)
done = []
flags = {"user": 0x10000000, "mnt": 0x20000, "pid": 0x20000000, "net": 0x40000000, "uts": 0x4000000, "ipc": 0x8000000, "cgroup": 0x2000000}
for name, flag in flags.items():
    if libc.unshare(flag) == 0:
        done.append("unshare " + name)
    pid = libc.syscall(56, flag | 17, 0, 0, 0, 0) if os.uname().machine == "x86_64" else -1
    if pid == 0:
        os._exit(0)
    if pid > 0:
        done.append("clone " + name)
    arguments = struct.pack("=11Q", flag, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
    pid = libc.syscall(435, arguments, len(arguments))
    if pid == 0:
        os._exit(0)
    if pid > 0:
        done.append("clone3 " + name)
if subprocess.run(["unshare", "-Ur", "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
    done.append("unshare -Ur")
print(f"ESCAPED: {', '.join(done)}" if done else "held: no new namespace")

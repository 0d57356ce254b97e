"""Runs every setuid program of the image, and files with capabilities, hoping for another user id.

kind: escape
seconds: 20
"""

import ctypes
import os
import stat
import subprocess
import time

found, done = 0, []
for top in ("/usr/bin", "/usr/sbin", "/usr/lib", "/bin", "/sbin", "/opt", "/usr/local"):
    for folder, _, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                found += 1
                quiet = subprocess.DEVNULL
                with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True) as process:
                    time.sleep(0.05)
                    try:
                        with open(f"/proc/{process.pid}/status") as status:
                            users = next(line.split()[1:] for line in status if line.startswith("Uid:"))
                        if set(users) != {str(os.getuid())}:
                            done.append(path)
                    except OSError:
                        pass
                    process.kill()
libc = ctypes.CDLL(None, use_errno=True)
for name, arguments in (("setuid", (0,)), ("setresuid", (0, 0, 0)), ("setgid", (0,)), ("setgroups", (1, ctypes.byref(ctypes.c_int(0))))):
    if getattr(libc, name)(*arguments) == 0:
        done.append(name)
for other in (1, 65532, 65533, os.getuid() - 1, os.getuid() + 1):
    if libc.setresuid(other, other, other) == 0:
        done.append(f"user {other}")
with open("/proc/self/status") as file:
    mine = dict(line.split(":", 1) for line in file)
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
    if int(mine[name], 16):
        done.append(name + mine[name].strip())
if mine["NoNewPrivs"].strip() != "1":
    done.append("new privileges")
print(f"ESCAPED: {done}" if done else f"held: {found} setuid programs, none of use")

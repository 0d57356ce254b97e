"""Leaves a process behind that watches with inotify who opens the files and devices that every sandbox has.

kind: between episodes
seconds: 20
host: unseen_by_watchers
"""

import ctypes
import os
import struct
import sys

OPEN, ACCESS = 0x20, 0x1
libc = ctypes.CDLL(None, use_errno=True)
commands = (sys.executable, "/bin/sh", "/usr/bin/cat")
devices = [f"/dev/{name}" for name in ("", "null", "zero", "urandom", "tty", "shm")]
paths = ["/", "/etc", "/etc/passwd", "/etc/hostname", "/etc/os-release", "/usr/bin", "/usr/bin/python3", *commands, *devices]
paths += [*map(os.path.realpath, commands), os.__file__, os.path.dirname(os.__file__), "/sys/devices/system/cpu/online"]
paths += ["/home/agent", "/tmp", "/agentrl", *(f"/agentrl/{name}" for name in ("memory", "exec_server.py", "exec_server.pyc", "egress"))]
watcher = libc.inotify_init1(os.O_CLOEXEC)
names = {}
for path in paths:
    number = libc.inotify_add_watch(watcher, path.encode(), OPEN | ACCESS)
    if number >= 0:
        names[number] = path
print(f"held: {len(names)} paths watched", flush=True)
if os.fork():
    os._exit(0)
os.setsid()
seen = open("seen", "w")  # opened once: each time would be an access that the watcher itself sees, without end
with open("watching", "w") as file:
    file.write(str(len(names)))
while True:
    data, at = os.read(watcher, 65536), 0
    while at < len(data):
        number, mask, _, length = struct.unpack_from("iIII", data, at)
        name = data[at + 16 : at + 16 + length].split(b"\0")[0].decode()
        seen.write(f"{names.get(number)}/{name} {mask:x}\n")
        at += 16 + length
    seen.flush()

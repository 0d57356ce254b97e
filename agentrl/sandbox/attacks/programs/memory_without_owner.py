"""Fills memory that no process owns: memory files, handed around and mapped, System V segments and queues.

kind: resources
needs: control groups
seconds: 15
ends: exit, memory, killed
"""

import ctypes
import json
import mmap
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
limit = json.load(open("arena.json"))["memory_mb"] << 20
held = 0
print("held: filling", flush=True)
for key in range(1, 400):
    size = 4 << 20
    segment = libc.shmget(key, size, 0o1666)
    if segment < 0:
        break
    address = libc.shmat(segment, None, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        break
    ctypes.memset(address, 1, size)
    libc.shmdt(ctypes.c_void_p(address))
    held += size
queues = sum(libc.msgget(key, 0o1666) >= 0 for key in range(1, 50))
if held + (16 << 20) > limit // 2:
    print(f"ESCAPED: {held >> 20} MiB of shared segments stay after their programs", flush=True)
files = []
for number in range(64):
    files.append(os.memfd_create(str(number)))
    os.ftruncate(files[-1], 8 << 20)
    mapped = mmap.mmap(files[-1], 8 << 20)
    for at in range(0, 8 << 20, 4096):
        mapped[at] = 1
print(f"held: {held >> 10} KiB of shared segments, {queues} message queues", flush=True)

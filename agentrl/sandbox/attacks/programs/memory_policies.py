"""Gives every second page of a memory file a memory policy of its own: kernel memory that is charged to nobody.

kind: resources
seconds: 20
ends: exit, memory, killed
needs: x86_64
"""

import ctypes
import json
import mmap
import os

limits = json.load(open("arena.json"))
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.syscall.argtypes = [ctypes.c_long] + [ctypes.c_ulong] * 6
mbind, interleave, page = 237, 3, 4096
mask = ctypes.c_ulong(1)
done, refused = 0, 0
print("held: binding", flush=True)
file = os.memfd_create("sparse")
os.ftruncate(file, 1 << 36)
address = libc.mmap(None, ctypes.c_size_t(1 << 36), mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(0))
for number in range(400_000):
    answer = libc.syscall(mbind, address + 2 * page * number, page, interleave, ctypes.addressof(mask), 64, 0)
    if answer:
        refused = ctypes.get_errno()
        break
    done += 1
print(f"ESCAPED: {done} policies" if done > 1000 else f"held: {done} policies, then error {refused}", flush=True)

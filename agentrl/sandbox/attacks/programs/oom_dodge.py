"""Makes itself an unlikely victim of the out-of-memory killer, fills memory with files and many small processes, and waits for
the exec server to be chosen.

kind: resources
needs: control groups
seconds: 15
ends: exit, memory, killed
"""

import json
import os
import time

limits = json.load(open("arena.json"))
for value in (-1000, 0, 500):
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(value))
        print("lowered to", value, flush=True)
        break
    except OSError:
        continue
for folder in ("/dev/shm", "/tmp", "."):
    try:
        with open(folder + "/fill", "wb", buffering=0) as file:
            for _ in range(limits["memory_mb"]):
                file.write(b"x" * (1 << 20))
    except OSError:
        continue
print("held: memory is full of files", flush=True)
for _ in range(limits["processes"]):
    try:
        if os.fork() == 0:
            kept = bytearray(b"x") * (6 << 20)
            time.sleep(60)
    except OSError:
        break
time.sleep(2)

"""Makes empty files until it gets no more: each costs kernel memory that belongs to no process.

kind: resources
needs: control groups
seconds: 20
ends: exit, memory, killed
"""

import json
import os

bound = 100 * json.load(open("arena.json"))["memory_mb"]
made = {}
for folder in ("/tmp", "/dev/shm", "/home/agent"):
    count = 0
    try:
        while count < bound:
            if count % 1000 == 0:
                os.mkdir(f"{folder}/d{count}")
            os.close(os.open(f"{folder}/d{count - count % 1000}/{count}", os.O_CREAT | os.O_WRONLY))
            count += 1
    except OSError:
        pass
    made[folder] = count
print(f"ESCAPED: {made} files and no end" if max(made.values()) >= bound else f"held: {made} files", flush=True)

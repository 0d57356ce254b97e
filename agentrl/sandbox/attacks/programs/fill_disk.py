"""Writes until every writable folder is full, keeps it full, and leaves.

kind: resources
needs: control groups
seconds: 20
ends: exit, memory, killed
"""

import json

limit = json.load(open("arena.json"))["disk_mb"]
wrote = {}
for folder in ("/dev/shm", "/tmp", "/home/agent", "/dev/mqueue", "/run", "/var/tmp", "/agentrl", "/dev"):
    count = 0.0
    try:
        with open(folder + "/fill", "wb", buffering=0) as file:
            while count < 16 * limit:
                count += file.write(b"x" * (1 << 16)) / (1 << 20)
    except OSError:
        pass
    wrote[folder] = round(count)
print(f"ESCAPED: wrote {wrote} MiB" if max(wrote.values()) > limit + 1 and max(wrote.values()) > 17 else f"held: {wrote} MiB")

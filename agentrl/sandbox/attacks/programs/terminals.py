"""Opens pseudo terminals until there are none left: the kernel has a fixed number for the whole machine.

kind: resources
needs: control groups
seconds: 15
host: terminals
"""

import json
import os
import time

limits = json.load(open("arena.json"))
workers = limits["processes"] - 8
for _ in range(workers):
    try:
        if os.fork():
            continue
    except OSError:
        break
    try:
        while True:
            os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        time.sleep(60)
    os._exit(0)
time.sleep(2)
print(f"held: {len(os.listdir('/dev/pts')) - 1} of its own", flush=True)

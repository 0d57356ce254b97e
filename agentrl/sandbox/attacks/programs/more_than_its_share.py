"""Takes every core of the machine, whatever it was given, and more CPU time than its share.

kind: resources
needs: control groups
seconds: 15
"""

import json
import os
import resource
import time

share = json.load(open("arena.json"))["cpus"]
try:
    os.sched_setaffinity(0, range(1024))
except OSError:
    pass
start = time.monotonic()
for _ in range(6):
    if os.fork() == 0:
        while time.monotonic() < start + 1.5:
            pass
        os._exit(0)
for _ in range(6):
    os.wait()
wall = time.monotonic() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
busy = (used.ru_utime + used.ru_stime) / wall
print(f"ESCAPED: {busy:.2f} cores where {share} were given" if busy > 1.3 * share + 0.2 else f"held: {busy:.2f} cores in {wall:.1f} s")

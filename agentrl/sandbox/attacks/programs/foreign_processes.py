"""Signals, traces and renices every process number there may be, the host's canary by its own.

kind: escape
seconds: 15
"""

import json
import os
import resource

canary = json.load(open("arena.json"))["host_pid"]
mine = os.getpid()
done = []
for pid in [canary, os.getppid(), *range(2, 20000)]:
    if pid in (0, 1, mine):
        continue
    try:
        os.kill(pid, 0)
        done.append(f"signal {pid}")
    except OSError:
        pass
for pid in (canary, 2):
    for step in (lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda pid: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))):
        try:
            step(pid)
            done.append(f"changed {pid}")
        except OSError:
            continue
try:
    os.setpriority(os.PRIO_USER, 0, 19)
except OSError:
    pass
servers = (1, os.getppid())  # the exec server, and what of it has launched this program
shown = [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in (*servers, mine)]
print(f"ESCAPED: {done[:8]} {shown}" if done or shown else "held: alone in its process space")

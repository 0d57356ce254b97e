"""Uses up what the kernel counts for each user of the machine: inotify instances, queued signals, message queues.

kind: resources
needs: control groups
seconds: 15
host: user_quotas
"""

import ctypes
import json
import os
import signal
import time

libc = ctypes.CDLL(None, use_errno=True)
limits = json.load(open("arena.json"))
workers = 4
for _ in range(workers):
    if os.fork() == 0:
        kept = 0
        while libc.inotify_init1(0) >= 0:
            kept += 1
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
        while libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None) == 0:
            kept += 1
        for number in range(64):
            libc.mq_open(f"/{os.getpid()}-{number}".encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
        time.sleep(60)
time.sleep(1)
print("held: instances, signals and queues taken", flush=True)

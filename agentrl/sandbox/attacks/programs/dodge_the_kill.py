"""Never stays the same process: each lives a moment, forks its successor and ends, while others stop themselves.

kind: lifetime
seconds: 1.5
ends: timeout, exit
host: timeout_leaves_nobody
"""

import os
import signal
import time

print("held: running away", flush=True)
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            continue
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)

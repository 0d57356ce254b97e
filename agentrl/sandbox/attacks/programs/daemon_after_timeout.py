"""Leaves daemons in sessions of their own that should outlive the timeout, and write to the working directory for ever.

kind: lifetime
seconds: 1
ends: timeout
host: nobody_is_left
"""

import os
import time

for number in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for fd in range(3):
            os.close(fd)
        while True:
            with open(f"alive{number}", "w") as file:
                file.write(str(time.monotonic()))
            time.sleep(0.01)
print("held: daemons started", flush=True)
time.sleep(60)

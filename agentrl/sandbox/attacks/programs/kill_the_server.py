"""Sends every signal to process 1 and to everything at once.

kind: lifetime
seconds: 10
ends: exit, killed
"""

import os
import signal

print("held: signals sent", flush=True)
if os.fork() == 0:
    for number in sorted(signal.valid_signals()):
        for _ in range(20):
            try:
                os.kill(1, number)
            except OSError:
                break
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        os.kill(-1, number)
os.wait()

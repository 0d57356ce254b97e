"""Blocks and ignores every signal it may, in a tree of processes.

kind: lifetime
seconds: 1
ends: timeout
"""

import os
import signal
import time

for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        continue
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.fork()
os.fork()
print("held: deaf", flush=True)
while True:
    time.sleep(1)

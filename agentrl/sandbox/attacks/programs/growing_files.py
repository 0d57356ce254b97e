"""Keeps growing, shrinking and replacing files while the host reads and snapshots them.

kind: files
seconds: 10
host: growing_files
"""

import os
import signal

open("result", "wb").write(b"x" * 100000)
if os.fork() == 0:
    signal.alarm(8)
    os.close(1)
    os.close(2)
    file = os.open("result", os.O_RDWR)
    while True:
        os.pwrite(file, b"y" * 65536, 65536)
        os.ftruncate(file, 10)
        os.ftruncate(file, 300000)
        try:
            os.rename("result", "other")
            os.rename("other", "result")
        except OSError:
            pass
print("held: growing", flush=True)

"""Leaves hundreds of ended children uncollected, and orphans of theirs to process 1.

kind: lifetime
seconds: 15
"""

import os
import time

made = 0
for _ in range(120):
    try:
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        made += 1
    except OSError:
        time.sleep(0.001)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pass
print(f"held: {made} zombies")

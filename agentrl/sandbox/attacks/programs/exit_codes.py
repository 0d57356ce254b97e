"""Ends by a signal or with a code out of range, hoping that the host takes it for success.

kind: protocol
seconds: 10
ends: killed
"""

import os
import signal
import sys

print("held: killed itself", flush=True)
if os.fork() == 0:
    os.kill(os.getppid(), signal.SIGKILL)
    sys.exit(256)
os.wait()
signal.pause()

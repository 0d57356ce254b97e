"""Ends at once, while a child keeps its output open and writes now and then.

kind: lifetime
seconds: 20
within: 5
"""

import os
import time

print("held: parent ended", flush=True)
if os.fork() == 0:
    while True:
        os.write(1, b".")
        time.sleep(0.15)

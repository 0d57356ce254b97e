"""Forks without end, in every child.

kind: resources
seconds: 1.5
ends: timeout
"""

import os

print("held: the bomb was lit", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        pass

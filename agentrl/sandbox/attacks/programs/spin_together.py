"""Takes all CPU time in many sandboxes at once, so that each time-out counts as an infrastructure fault.

kind: resources
seconds: 3
within: 60
ends: timeout
host: spin_together
"""

import os

print("held: spinning", flush=True)
for _ in range(3):
    try:
        os.fork()
    except OSError:
        break
while True:
    pass

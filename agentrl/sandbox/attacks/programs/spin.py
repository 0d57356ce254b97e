"""Burns every core with as many processes as it gets.

kind: resources
seconds: 2
ends: timeout
"""

import os

print("held: spinning", flush=True)
for _ in range(5):
    try:
        os.fork()
    except OSError:
        break
while True:
    pass

"""Takes ever more memory, in several processes at once.

kind: resources
needs: control groups
seconds: 15
ends: memory, killed
"""

import os

print("held: the bomb was lit", flush=True)
for _ in range(3):
    os.fork()
kept = []
while True:
    kept.append(b"x" * (4 << 20))

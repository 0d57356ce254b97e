"""Writes a mark everywhere that the next agent might look, and leaves processes, segments and queues.

kind: between episodes
seconds: 20
ends: exit, memory, killed
"""

import ctypes
import json
import os
import time

mark = json.load(open("arena.json"))["mark"]
places = 0
for folder, folders, _ in os.walk("/"):
    if folder == "/":
        folders[:] = [name for name in folders if name not in ("proc", "sys")]
    try:
        with open(f"{folder}/{mark}", "w") as file:
            file.write(mark)
        places += 1
    except OSError:
        continue
libc = ctypes.CDLL(None, use_errno=True)
libc.shmget(0x5EED, 4096, 0o1666)
libc.msgget(0x5EED, 0o1666)
libc.semget(0x5EED, 1, 0o1666)
if os.fork() == 0:
    os.close(1)
    os.close(2)
    time.sleep(600)
print(f"held: {places} marks left")

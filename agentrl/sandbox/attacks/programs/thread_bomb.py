"""Starts threads until it gets no more: they count as processes.

kind: resources
seconds: 10
"""

import json
import os
import threading
import time

limit = json.load(open("arena.json"))["processes"]
threading.stack_size(65536)
count = 0
try:
    while count < 20 * limit:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print(f"ESCAPED: {count} threads of {limit} allowed" if count > limit else f"held: no more than {count} threads", flush=True)
os._exit(0)

"""Opens descriptors until it gets no more, in several processes, and parks more of them inside sockets.

kind: resources
seconds: 15
"""

import array
import json
import os
import socket
import time

limits = json.load(open("arena.json"))
workers = max(2, limits["processes"] // 2)
for _ in range(workers):
    try:
        if os.fork():
            continue
    except OSError:
        break
    try:
        ours, theirs = socket.socketpair()
        null = os.open("/dev/null", os.O_RDONLY)
        while True:
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 100))])
    except OSError:
        pass
    try:
        while True:
            os.dup(0)
    except OSError:
        pass
    time.sleep(4)
    os._exit(0)
count = 0
try:
    while count < 100 * limits["open_files"]:
        os.dup(0)
        count += 1
except OSError:
    pass
time.sleep(0.5)
print(f"ESCAPED: {count} descriptors" if count > limits["open_files"] else f"held: {count} descriptors in each process", flush=True)

"""Fills the buffers of sockets: kernel memory that is charged to no process.

kind: resources
needs: control groups
seconds: 10
ends: exit, memory, killed
"""

import json
import os
import socket
import time

limits = json.load(open("arena.json"))


def available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("MemAvailable"))


def fill() -> None:
    kept: list[object] = []
    try:
        while True:
            pair = socket.socketpair()
            kept.append(pair)
            for end in pair:
                end.setblocking(False)
                try:
                    while True:
                        end.send(b"x" * 32768)
                except BlockingIOError:
                    continue
    except OSError:
        pass
    time.sleep(60)


before = available()
print("held: filling", flush=True)
for _ in range(min(12, limits["processes"] - 2)):
    if os.fork() == 0:
        fill()
time.sleep(1.5)
taken = before - available()
bound = limits["memory_mb"] + 128
print(f"ESCAPED: {taken} MiB of the host's memory" if taken > bound else f"held: {taken} MiB taken", flush=True)
os.kill(-1, 9)

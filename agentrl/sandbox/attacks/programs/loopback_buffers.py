"""Fills the buffers of TCP and UDP sockets on the loopback, among them connections that nobody accepts.

kind: resources
needs: control groups
seconds: 20
ends: exit, memory, killed
"""

import contextlib
import json
import os
import socket
import time

limits = json.load(open("arena.json"))
block = b"x" * 65536


def taken() -> int:
    """Of all sockets of the machine."""
    with open("/proc/net/sockstat") as file:
        words = [line.split() for line in file if line.startswith(("TCP:", "UDP:"))]
    return sum(int(line[line.index("mem") + 1]) for line in words) >> 8


def fill(end: socket.socket) -> None:
    end.setblocking(False)
    try:
        while True:
            end.send(block[:32768])
    except OSError:
        return


def accepted() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    while True:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        kept.extend((client, server))
        fill(client)
        fill(server)


def waiting() -> None:
    while True:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        with contextlib.suppress(OSError):  # which raises the size as well
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 22)
            print("ESCAPED: SO_RCVLOWAT raises the buffers of connections that nobody accepts", flush=True)
        kept.append(listener)
        for _ in range(500):
            with socket.create_connection(listener.getsockname(), timeout=1) as client:
                fill(client)


def datagrams() -> None:
    while True:
        own = socket.socket(type=socket.SOCK_DGRAM)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        kept.append(own)
        own.setblocking(False)
        for _ in range(500):
            own.send(block[:32768])


kept: list[socket.socket] = []
before = taken()
print("held: filling", flush=True)
for work in (accepted, waiting, datagrams):
    for _ in range(4):
        if os.fork() == 0:
            while True:
                try:
                    work()
                except OSError:
                    time.sleep(0.05)
end, most = time.monotonic() + 8, 0
while time.monotonic() < end:
    most = max(most, taken() - before)
    if most > limits["memory_mb"]:
        print(f"ESCAPED: {most} MiB in buffers of sockets", flush=True)
        break
    time.sleep(0.02)
print(f"held: {most} MiB in buffers of sockets", flush=True)
os.kill(-1, 9)

"""Opens connections to the proxy without end, leaves them half said, drips, pours through tunnels, never reads what comes back.

kind: network
seconds: 25
network: allowed
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time

allowed = json.load(open("arena.json"))["allowed_port"]
connect = b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\n" % allowed
end = time.monotonic() + 14
counts = dict.fromkeys(("left", "dripped", "poured", "refused"), 0)


def link() -> socket.socket:
    made = socket.socket()
    made.settimeout(1.0)
    made.connect(("127.0.0.1", 3128))
    return made


def leave() -> None:
    kept: list[socket.socket] = []
    while time.monotonic() < end:
        try:
            kept.append(link())
            counts["left"] += 1
        except OSError:
            time.sleep(0.05)
        if len(kept) > 20:
            kept = []


def drip() -> None:
    while time.monotonic() < end:
        try:
            with link() as one:
                for byte in b"GET http://127.0.0.1/ HTTP/1.1\r\n" * 100:
                    if time.monotonic() > end:
                        break
                    one.send(bytes([byte]))
                    counts["dripped"] += 1
                    time.sleep(0.05)
        except OSError:
            time.sleep(0.05)


def pour() -> None:
    while time.monotonic() < end:
        try:
            with link() as one:
                one.sendall(connect + b"PUT /sink HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % allowed)
                while time.monotonic() < end:
                    counts["poured"] += one.send(bytes(65536))
        except OSError:
            time.sleep(0.05)


def never_read() -> None:
    while time.monotonic() < end:
        try:
            with link() as one:
                one.sendall(connect)
                while time.monotonic() < end:
                    one.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % allowed)
        except OSError:
            time.sleep(0.05)


def refused() -> None:
    while time.monotonic() < end:
        try:
            with link() as one:
                one.sendall(b"CONNECT %s.example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n" % os.urandom(8).hex().encode())
                one.recv(100)
                counts["refused"] += 1
        except OSError:
            time.sleep(0.05)


works = [leave, drip, drip, pour, pour, never_read, refused, refused]
threads = [threading.Thread(target=work) for work in works]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"held: {counts}")

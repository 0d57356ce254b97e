"""Sends endless request heads to the gateway through a tunnel, so that the driver's memory grows before any key is checked.

kind: network
network: gateway
seconds: 45
"""

from __future__ import annotations

import json
import socket
import time

known = json.load(open("arena.json"))
AT_ONCE, EACH, SECONDS = 8, 50 << 20, 4.0
BUFFERED = 2 << 20  # by kernel and proxy, of a connection that its server has closed
kinds = {
    "header": (b"GET / HTTP/1.1\r\nHost: h\r\nX: ", b"x" * 65536),
    "headers": (b"GET / HTTP/1.1\r\nHost: h\r\n", b"a: b\r\n" * 10922),
    "target": (b"GET /", b"x" * 65536),
    "trailers": (b"POST /v1/messages HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n \r\n0\r\n", b"a: b\r\n" * 10922),
    "requests": (b"", b"GET / HTTP/1.1\r\n\r\n" * 3640),
}


def tunnel() -> socket.socket | None:
    link = socket.create_connection(("127.0.0.1", 3128), timeout=5)
    try:
        link.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\n" % known["gateway_port"])
        if b" 200 " in link.recv(4096):
            return link
    except OSError:  # a gateway that is busy with what it has taken
        pass
    link.close()
    return None


taken = {}
for name, (start, piece) in kinds.items():
    links = [link for link in (tunnel() for _ in range(AT_ONCE)) if link is not None]
    if not links:
        continue
    taken[name], deadline = 0, time.monotonic() + SECONDS
    for link in links:
        link.settimeout(1)
        try:
            link.sendall(start)
            sent = 0
            while sent < EACH and time.monotonic() < deadline:
                link.sendall(piece)
                sent += len(piece)
                taken[name] += len(piece)
        except OSError:  # closed
            pass
    for link in links:
        link.close()
most = max(taken.values(), default=0)
if most > AT_ONCE * BUFFERED:
    print(f"ESCAPED: the gateway took {taken} bytes")
elif len(taken) < len(kinds):
    raise SystemExit(f"reached the gateway for {sorted(taken)} alone")
else:
    print(f"held: at most {most >> 20} MiB of {AT_ONCE} heads were taken")

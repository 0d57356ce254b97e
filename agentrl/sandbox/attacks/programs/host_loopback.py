"""Reaches for what listens on the host: its loopback, a port such as the policy server's, abstract and file sockets.

kind: network
seconds: 15
"""

import json
import socket

arena = json.load(open("arena.json"))
done = []
for port in {arena["tcp_port"], 8000, 22, 2375}:
    for address in ("127.0.0.1", "::1", "0.0.0.0", "127.0.1.1", "::ffff:127.0.0.1"):
        try:
            with socket.create_connection((address, port), timeout=1) as link:
                link.sendall(b"GET / HTTP/1.0\r\n\r\n")
            done.append(f"{address}:{port}")
        except OSError:
            continue
for name in ("\0" + arena["abstract"], arena["socket_path"]):
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(name)
        done.append(repr(name))
    except OSError:
        continue
print(f"ESCAPED: connected to {done}" if done else "held: nothing of the host listens here")

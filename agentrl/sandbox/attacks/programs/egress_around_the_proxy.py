"""Goes around the proxy, or after it: raw TCP and UDP, name servers, its handing-over socket, its port, every process killed.

kind: network
seconds: 40
network: allowed
"""

import json
import os
import signal
import socket

arena = json.load(open("arena.json"))
got = []
for port in (arena["tcp_port"], arena["allowed_port"], 53, 80):
    for address in ("127.0.0.1", "::1", "10.0.0.1", "1.1.1.1", "169.254.169.254", "172.17.0.1", "2606:4700::1111"):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as link:
                    link.settimeout(1)
                    link.connect((address, port))
                    link.send(b"x")
                    link.recv(1)
                got.append(f"{address}:{port}")
            except OSError:
                continue
try:
    got.append(str(socket.getaddrinfo("example.com", 80)))
except OSError:
    pass
with open("/proc/net/route") as file:
    got += file.readlines()[1:]
for path in ("/agentrl/egress", "/agentrl/link"):
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(path)
        got.append(f"connected to {path}")
    except OSError:
        pass
for address in ("127.0.0.1", "0.0.0.0"):
    for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        try:
            with socket.socket() as mine:
                if option is not None:
                    mine.setsockopt(socket.SOL_SOCKET, option, 1)
                mine.bind((address, 3128))
                mine.listen()
            got.append(f"the proxy's port can be taken at {address}")
        except OSError:
            pass
try:
    os.kill(-1, signal.SIGKILL)  # but not the one that asks
except ProcessLookupError:
    pass
with socket.create_connection(("127.0.0.1", 3128), timeout=10) as link:
    link.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\n" % arena["tcp_port"])
    answer = link.recv(4096)
if not answer.startswith(b"HTTP/1.1 403"):
    got.append(f"with every process killed the proxy says {answer[:60]!r}")
print(f"ESCAPED: {got[:5]}" if got else "held: nothing but the proxy answers, and that goes on")

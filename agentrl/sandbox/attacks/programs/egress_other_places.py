"""Asks the proxy for what is not on its list: other hosts and ports, the host's loopback in every spelling, the metadata address.

kind: network
seconds: 60
network: allowed
"""

import json
import socket

arena = json.load(open("arena.json"))
other, allowed = arena["tcp_port"], arena["allowed_port"]


def ask(request: str) -> str:
    with socket.create_connection(("127.0.0.1", 3128), timeout=3) as link:
        link.sendall(request.encode("latin-1"))
        try:
            return link.recv(4096).split(b"\r\n")[0].decode("latin-1")
        except TimeoutError:
            return "no refusal"


loopback = ["127.0.0.1", "localhost", "127.1", "127.0.1.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "0", "[::1]", "[::]"]
loopback += ["[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "127.0.0.1.", "LOCALHOST", "ip6-localhost"]
places = [(host, port) for host in loopback for port in {other, 22, 8000, 2375}]
places += [(host, allowed) for host in loopback if host not in ("127.0.0.1", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]")]
places += [(host, 80) for host in ("169.254.169.254", "metadata.google.internal", "168.63.129.16", "[fd00:ec2::254]", "100.100.100.200")]
places += [(host, 443) for host in ("example.com", "1.1.1.1", "10.0.0.1", "192.168.1.1", "[2606:4700::1111]", "224.0.0.1")]
places += [("8.8.8.8", 53), ("127.0.0.53", 53), ("172.17.0.1", allowed), ("host.docker.internal", allowed)]
got = []
for host, port in places:
    for line in (f"CONNECT {host}:{port}", f"GET http://{host}:{port}/"):
        request = f"{line} HTTP/1.1\r\nHost: 127.0.0.1:{allowed}\r\n\r\n"
        answer = ask(request)
        if not answer.startswith(("HTTP/1.1 403", "HTTP/1.1 400")):
            got.append(f"{request.split()[1]}: {answer}")
    if len(got) > 4:
        break
assert ask(f"CONNECT 127.0.0.1:{allowed} HTTP/1.1\r\nHost: 127.0.0.1:{allowed}\r\n\r\n").startswith("HTTP/1.1 200"), (
    "what is allowed cannot be reached"
)
print(f"ESCAPED: {got}" if got else f"held: {2 * len(places)} requests refused, the allowed one served")

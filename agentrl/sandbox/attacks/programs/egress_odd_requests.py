"""Sends the proxy requests that two readers could understand differently, to get a request to another host past it.

kind: network
seconds: 60
network: allowed
"""

from __future__ import annotations

import json
import socket

arena = json.load(open("arena.json"))
other, allowed = arena["tcp_port"], arena["allowed_port"]
good = f"127.0.0.1:{allowed}"
bad = f"127.0.0.1:{other}"


def ask(request: str | bytes) -> str:
    try:
        with socket.create_connection(("127.0.0.1", 3128), timeout=20) as link:
            data = request if isinstance(request, bytes) else request.encode("latin-1")
            link.sendall(data)
            if b"\r\n\r\n" not in data:
                link.shutdown(socket.SHUT_WR)
            return link.recv(4096).split(b"\r\n")[0].decode("latin-1")
    except OSError as error:
        return repr(error)


targets = [f"{good}@{bad}", f"{bad}@{good}", f"user:pass@{bad}", f"{bad}#{good}", f"{bad}?{good}", f"{bad}/{good}", f"{bad}\\{good}"]
targets += [
    f"{bad}%23@{good}",
    f"{good}%40{bad}",
    f"{good}%00.{bad}",
    f"{good} {bad}",
    f"{good}\t{bad}",
    f"{good}:{other}",
    f"{good},{bad}",
]
targets += [
    f"http://{good}",
    f"[{good}]",
    f"[127.0.0.1]:{allowed}",
    f"127.0.0.1:+{allowed}",
    f"127.0.0.1:0x{allowed:x}",
    f"127.0.0.1: {allowed}",
]
targets += [
    f"127.0.0.1:{allowed + 65536}",
    f"127.0.0.1:-{65536 - allowed}",
    "127.0.0.1",
    "127.0.0.1:",
    ":80",
    "*",
    "/",
    "",
    "\u00b9\u00b2\u00b7.0.0.1:80",
]
requests: list[str | bytes] = [f"CONNECT {target} HTTP/1.1\r\nHost: {good}\r\n\r\n" for target in targets]
requests += [
    f"GET http://{target}/forbidden HTTP/1.1\r\nHost: {good}\r\n\r\n" for target in targets if target not in ("127.0.0.1", "127.0.0.1:")
]
requests += [
    f"GET {scheme}://{good}/forbidden HTTP/1.1\r\nHost: {good}\r\n\r\n" for scheme in ("https", "ftp", "file", "gopher", "unix", "")
]
requests += [f"GET {path} HTTP/1.1\r\nHost: {good}\r\n\r\n" for path in (f"//{good}/forbidden", "/forbidden")] + ["GET /forbidden\r\n\r\n"]
start = f"GET http://{good}/forbidden HTTP/1.1\r\nHost: {good}\r\n"
lines = [
    f"Host: {good}",
    "Host: a\r\nHost: b",
    "X: y\r\n z",
    "X : y",
    "X",
    ": y",
    "X: a\nHost: b",
    "X: a\rHost: b",
    "X: \0",
    "X\0: y",
    "Content-Length: -1",
]
lines += [
    "Content-Length: 1\r\nContent-Length: 2",
    "Content-Length: 0x10",
    "Content-Length: 1e3",
    "Content-Length: ",
    "Transfer-Encoding: chunked",
]
lines += [
    "Transfer-Encoding: identity",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 3",
    "Transfer-Encoding:\x0bchunked",
]
lines += ["A: " + "a" * 70_000, "\r\n".join(f"A{number}: b" for number in range(5000))]
requests += [f"{start}{line}\r\n\r\n" for line in lines]
requests += [start.replace("HTTP/1.1", version) + "\r\n" for version in ("HTTP/0.9", "HTTP/2.0", "HTTP/1.10", "http/1.1", "HTTP/1.1 x", "")]
requests += [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x05\x01\x00\r\n\r\n",
    b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00\r\n\r\n",
    b"\x16\x03\x01" + bytes(200),
]
requests += [start.replace("\r\n", "\n") + "\n", "a" * 200_000, b"\r\n" * 2000, bytes(range(256)) * 300]
served = [
    (request[:80], answer) for request in requests if not (answer := ask(request)).startswith(("HTTP/1.1 4", "Conn", "Broken")) and answer
]
assert ask(f"GET http://{good}/ HTTP/1.1\r\nHost: {bad}\r\n\r\n").startswith("HTTP/1.1 200"), "what is allowed cannot be reached"
print(f"ESCAPED: {served[:4]}" if served else f"held: {len(requests)} requests refused")

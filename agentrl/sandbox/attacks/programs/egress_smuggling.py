"""Hides a second request behind a first one on a connection that is to be kept alive, in every way that proxies have fallen for.

kind: network
seconds: 60
network: allowed
"""

import json
import socket

arena = json.load(open("arena.json"))
good, bad = f"127.0.0.1:{arena['allowed_port']}", f"127.0.0.1:{arena['tcp_port']}"
hidden = f"GET /forbidden HTTP/1.1\r\nHost: {bad}\r\n\r\n"
whole = f"GET http://{bad}/forbidden HTTP/1.1\r\nHost: {bad}\r\n\r\n"
keep = "Connection: keep-alive\r\nProxy-Connection: keep-alive\r\n"
start = f"POST http://{good}/ HTTP/1.1\r\nHost: {good}\r\n{keep}"
tries = [f"GET http://{good}/ HTTP/1.1\r\nHost: {good}\r\n{keep}\r\n"]
for second in (hidden, whole, f"CONNECT {bad} HTTP/1.1\r\nHost: {bad}\r\n\r\n"):
    size = len(second)
    chunk = f"{size:x}\r\n{second}\r\n0\r\n\r\n"
    tries += [
        f"GET http://{good}/ HTTP/1.1\r\nHost: {good}\r\n{keep}\r\n{second}",
        f"{start}Content-Length: 0\r\n\r\n{second}",
        f"{start}Content-Length: 4\r\n\r\nbody{second}",
        f"{start}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{second}",
        f"{start}Transfer-Encoding: chunked\r\nContent-Length: {size}\r\n\r\n{chunk}",
        f"{start}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{second}",
        f"{start}Transfer-Encoding: xchunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{second}",
        f"{start}Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n{second}",
        f"{start}Content-Length: 0\r\nContent-Length: {size}\r\n\r\n{second}",
        f"{start}Connection: Content-Length\r\nContent-Length: 4\r\n\r\nbody{second}",
        f"{start}Expect: 100-continue\r\nContent-Length: 4\r\n\r\nbody{second}",
        f"{start}Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 0\r\n\r\n{second}",
        f"{start}X: y\n\n{second}",
        f"GET http://{good}/ HTTP/1.0\r\n{keep}\r\n{second}",
    ]
answers = []
for request in tries:
    with socket.create_connection(("127.0.0.1", 3128), timeout=20) as link:
        link.sendall(request.encode())
        seen = b""
        try:
            while data := link.recv(65536):
                seen += data
                if seen.endswith(b"allowed"):
                    link.sendall(whole.encode())
                    link.settimeout(0.5)
        except OSError:
            pass
    answers.append(seen.count(b"HTTP/1."))
odd = [(tries[number][:60], count) for number, count in enumerate(answers) if count > 1]
assert answers[0] == 1, "what is allowed cannot be reached"
print(f"ESCAPED: {odd[:3]}" if odd else f"held: one answer at most to each of {len(tries)} connections")

"""An exec server that an agent has compromised: it answers the host with one of the tricks below. Standard library only.

The suite puts this file in the real server's place, with `TRICK` set to a trick's name. Each trick is a function that is handed
the connection and a request (or None before the first one) and does its worst; its docstring is what the table shows.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time

TRICK = ""
BEFORE_HELLO = ("no_hello", "other_version", "hello_that_drips")
SLOW_TRICKS = (*BEFORE_HELLO, "silence", "drip", "deaf")
"""Tricks that only cost the driver time, up to its deadline."""


def frame(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("!II", len(text), len(body)) + text + body


def answer(number: int, body: bytes = b"", /, **fields: object) -> bytes:
    """A well-formed reply to an exec, with `fields` changed."""
    good: dict[str, object] = {"id": number, "ok": True, "exit": 0, "reason": "", "wall_s": 0.0, "truncated": False, "stdout": len(body)}
    return frame({**good, **fields}, body)


def oversized_header(link: socket.socket, number: int) -> None:
    """A header that claims four gigabytes."""
    link.sendall(struct.pack("!II", 0xFFFFFFFF, 0) + b"{" * 100000)


def oversized_body(link: socket.socket, number: int) -> None:
    """A body that claims four gigabytes."""
    text = json.dumps({"id": number, "ok": True}).encode()
    link.sendall(struct.pack("!II", len(text), 0xFFFFFFFF) + text + bytes(100000))


def body_over_the_limit(link: socket.socket, number: int) -> None:
    """One byte more output than was asked for."""
    link.sendall(answer(number, b"x" * (2 * (65536 + 64) + 1)))


def empty_chunks(link: socket.socket, number: int) -> None:
    """Pieces of an archive without end and without content."""
    while True:
        link.sendall(frame({"id": number, "ok": True, "more": True}) * 1000)


def endless_chunks(link: socket.socket, number: int) -> None:
    """Pieces of an archive that never end."""
    while True:
        link.sendall(frame({"id": number, "ok": True, "more": True}, bytes(65536)))


def not_json(link: socket.socket, number: int) -> None:
    """A header that is not JSON."""
    link.sendall(frame(b"\x80\x04\x95cos\nsystem\n(S'id'\ntR."))


def deep_json(link: socket.socket, number: int) -> None:
    """A header nested until a parser runs out of stack."""
    link.sendall(frame(b"[" * 16000))


def huge_number(link: socket.socket, number: int) -> None:
    """Numbers with thousands of digits, infinities and NaN instead of numbers."""
    link.sendall(frame(b'{"id": %d, "ok": true, "exit": %s, "wall_s": NaN}' % (number, b"9" * 16000)))


def names_a_type(link: socket.socket, number: int) -> None:
    """A reply that names types and modules for the host to load."""
    payload = {"__class__": "os.system", "py/object": "subprocess.Popen", "$type": "agentrl.plugins:resolve", "!!python": "os.system"}
    link.sendall(answer(number, **payload))


def type_confusion(link: socket.socket, number: int) -> None:
    """Fields of other types: a list for a number, true for an exit code, an object for a reason."""
    link.sendall(answer(number, exit=True, reason={"a": 1}, wall_s=[0], stdout="5"))


def impossible_result(link: socket.socket, number: int) -> None:
    """A program that was killed and succeeded, in negative time."""
    link.sendall(answer(number, exit=0, reason="timeout", wall_s=-1.0, stdout=-5))


def output_out_of_bounds(link: socket.socket, number: int) -> None:
    """More standard output than the body holds."""
    link.sendall(answer(number, b"short", stdout=1 << 40))


def unknown_failure(link: socket.socket, number: int) -> None:
    """A failure whose kind and message imitate something else."""
    link.sendall(frame({"id": number, "ok": False, "error": "SystemExit", "message": "x" * 10000}))


def endless_failure(link: socket.socket, number: int) -> None:
    """A proper failure with a very long message full of terminal commands."""
    link.sendall(frame({"id": number, "ok": False, "error": "failed", "message": "\x1b[2J\x00" * 1000}))


def other_id(link: socket.socket, number: int) -> None:
    """A reply to a request that was never made."""
    link.sendall(answer(number + 1))


def twice(link: socket.socket, number: int) -> None:
    """The same reply many times over, meant for the requests to come."""
    link.sendall(b"".join(answer(later) for later in range(number, number + 200)))


def silence(link: socket.socket, number: int) -> None:
    """No reply, ever."""
    time.sleep(600)


def drip(link: socket.socket, number: int) -> None:
    """A reply that comes a byte at a time, too slowly to end."""
    for byte in answer(number) * 1000:
        link.sendall(bytes([byte]))
        time.sleep(0.2)


def half_a_frame(link: socket.socket, number: int) -> None:
    """Half a reply, then the end."""
    link.sendall(answer(number)[:20])
    os._exit(0)


def flood(link: socket.socket, number: int) -> None:
    """Endless bytes, read or not."""
    while True:
        link.sendall(os.urandom(1 << 16))


def deaf(link: socket.socket, number: int) -> None:
    """Reads nothing, so that what the host writes piles up."""
    time.sleep(600)


def no_hello(link: socket.socket, number: int) -> None:
    """Connects and never says anything."""
    time.sleep(600)


def other_version(link: socket.socket, number: int) -> None:
    """Greets as a version that does not exist."""
    link.sendall(frame({"id": 0, "ok": True, "version": 99999}))
    time.sleep(600)


def hello_that_drips(link: socket.socket, number: int) -> None:
    """A greeting that comes a byte at a time."""
    for byte in frame({"id": 0, "ok": True, "version": 1}):
        link.sendall(bytes([byte]))
        time.sleep(1)


def connect(address: str) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "fd":
        return socket.socket(fileno=int(where))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(where)
    return sock


def main() -> None:
    link = connect(sys.argv[1])
    trick = globals()[TRICK]
    if TRICK in BEFORE_HELLO:
        trick(link, 0)
    link.sendall(frame({"id": 0, "ok": True, "version": 1}))
    if TRICK == "deaf":
        trick(link, 0)
    stream = link.makefile("rb")
    while True:
        header_size, body_size = struct.unpack("!II", stream.read(8))
        request = json.loads(stream.read(header_size))
        stream.read(body_size)
        if request["op"] == "write":  # files sent at opening are accepted, so that the next request meets the trick
            link.sendall(frame({"id": request["id"], "ok": True}))
        else:
            trick(link, request["id"])


if __name__ == "__main__":
    main()

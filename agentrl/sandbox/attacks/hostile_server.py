"""A compromised exec server that answers the host with one of the tricks below. Uses only the standard library.

The suite runs this file instead of the real server, with `TRICK` set to a trick's name.
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
"""Tricks that only make the driver wait, up to its deadline."""

TRICKS = {
    "oversized_header": "A header that claims four gigabytes.",
    "oversized_body": "A body that claims four gigabytes.",
    "body_over_the_limit": "One more byte of output than requested.",
    "empty_chunks": "Endless empty pieces of an archive.",
    "endless_chunks": "Endless pieces of an archive.",
    "not_json": "A header that is not JSON.",
    "deep_json": "A header that is nested deeper than a parser's stack.",
    "huge_number": "Numbers with thousands of digits, and NaN.",
    "names_a_type": "A reply that names types and modules for the host to load.",
    "type_confusion": "Fields of the wrong type: a list for a number, true for an exit code, an object for a reason.",
    "impossible_result": "A program result that is both killed and successful, with a negative run time.",
    "output_out_of_bounds": "More standard output than the body contains.",
    "unknown_failure": "A failure with the kind of an exception, and a very long message.",
    "endless_failure": "A valid failure with a long message full of terminal commands.",
    "other_id": "A reply to a request that does not exist.",
    "twice": "Replies to future requests.",
    "silence": "No reply.",
    "drip": "A reply one byte at a time, too slow to finish.",
    "half_a_frame": "Half a reply, then the end of the connection.",
    "flood": "Endless bytes.",
    "deaf": "Reads nothing, so the host's writes accumulate.",
    "no_hello": "Connects and sends nothing.",
    "other_version": "A greeting with an unknown protocol version.",
    "hello_that_drips": "A greeting one byte at a time.",
}
"""Name -> description of each trick."""


def frame(header: object, body: bytes = b"") -> bytes:
    """Returns a frame with `header`, which need not be a valid reply header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("!II", len(text), len(body)) + text + body


def answer(number: int, body: bytes = b"", /, **fields: object) -> bytes:
    """Returns a well-formed reply to an exec request, with `fields` replaced."""
    good: dict[str, object] = {"id": number, "ok": True, "exit": 0, "reason": "", "wall_s": 0.0, "truncated": False, "stdout": len(body)}
    return frame({**good, **fields}, body)


def replies(number: int) -> dict[str, bytes]:
    """Returns a mapping trick -> bytes sent in reply to request `number`, for tricks that send fixed bytes."""
    text = json.dumps({"id": number, "ok": True}).encode()
    types = {
        "__class__": "os.system",
        "py/object": "subprocess.Popen",
        "$type": "agentrl.plugins.references:resolve",
        "!!python": "os.system",
    }
    terminal = "\x1b[2J\x00" * 1000
    return {
        "oversized_header": struct.pack("!II", 0xFFFFFFFF, 0) + b"{" * 100000,
        "oversized_body": struct.pack("!II", len(text), 0xFFFFFFFF) + text + bytes(100000),
        "body_over_the_limit": answer(number, b"x" * (2 * (65536 + 64) + 1)),
        "not_json": frame(b"\x80\x04\x95cos\nsystem\n(S'id'\ntR."),
        "deep_json": frame(b"[" * 16000),
        "huge_number": frame(b'{"id": %d, "ok": true, "exit": %s, "wall_s": NaN}' % (number, b"9" * 16000)),
        "names_a_type": answer(number, **types),
        "type_confusion": answer(number, exit=True, reason={"a": 1}, wall_s=[0], stdout="5"),
        "impossible_result": answer(number, exit=0, reason="timeout", wall_s=-1.0, stdout=-5),
        "output_out_of_bounds": answer(number, b"short", stdout=1 << 40),
        "unknown_failure": frame({"id": number, "ok": False, "error": "SystemExit", "message": "x" * 10000}),
        "endless_failure": frame({"id": number, "ok": False, "error": "failed", "message": terminal}),
        "other_id": answer(number + 1),
        "twice": b"".join(answer(later) for later in range(number, number + 200)),
        "other_version": frame({"id": 0, "ok": True, "version": 99999}),
    }


def play(link: socket.socket, number: int) -> None:
    """Plays the trick in reply to request `number`."""
    chunk = frame({"id": number, "ok": True, "more": True})
    endless = {"empty_chunks": chunk * 1000, "endless_chunks": frame(json.loads(chunk[8:]), bytes(65536)), "flood": os.urandom(1 << 16)}
    slow = {"drip": (answer(number) * 1000, 0.2), "hello_that_drips": (frame({"id": 0, "ok": True, "version": 1}), 1)}
    if TRICK == "half_a_frame":
        link.sendall(answer(number)[:20])
        os._exit(0)
    while TRICK in endless:
        link.sendall(endless[TRICK])
    if TRICK in slow:
        data, pause_s = slow[TRICK]
        for byte in data:
            link.sendall(bytes([byte]))
            time.sleep(pause_s)
    link.sendall(replies(number).get(TRICK, b""))
    if TRICK in SLOW_TRICKS:
        time.sleep(600)


def main() -> None:
    """Serves requests from the host, and plays the trick that `TRICK` names."""
    kind, _, where = sys.argv[1].partition(":")
    link = socket.socket(fileno=int(where)) if kind == "fd" else socket.socket(socket.AF_UNIX)
    if kind != "fd":
        link.connect(where)
    if TRICK in BEFORE_HELLO:
        play(link, 0)
    link.sendall(frame({"id": 0, "ok": True, "version": 1}))
    if TRICK == "deaf":
        play(link, 0)
    stream = link.makefile("rb")
    while True:
        header_size, body_size = struct.unpack("!II", stream.read(8))
        request = json.loads(stream.read(header_size))
        stream.read(body_size)
        if request["op"] == "write":  # accepts the files sent at opening, so that the trick answers the next request
            link.sendall(frame({"id": request["id"], "ok": True}))
        else:
            play(link, request["id"])


if __name__ == "__main__":
    main()

"""Requests to the exec server: for any names and sizes, it answers with a frame that the host accepts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.sandbox import arguments, frames
from agentrl.sandbox.inside.spawn import work
from tests.fuzz import mutators
from tests.fuzz.target import Check, Target, must
from tests.fuzz.targets.desk import Desk

MOST_CALLS = 20
MOST_BYTES = 1 << 20


def prepare(scratch: Path) -> Check:
    desk = Desk(scratch)

    def check(data: bytes) -> None:
        try:
            calls = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(calls, list):
            for call in calls[:MOST_CALLS]:
                if isinstance(call, list) and call and isinstance(call[0], str):
                    _call(desk, call[0], call[1:])
        desk.tidy()

    return check


def _call(desk: Desk, kind: str, values: Sequence[Any]) -> None:
    """One call as `agentrl.sandbox.channel_sandbox` makes it; invalid arguments raise ValueError or TypeError."""
    first, second, third, fourth = (*values, None, None, None, None)[:4]
    try:
        if kind == "read":
            max_bytes = arguments.size(second, "max_bytes", MOST_BYTES)
            desk.ask("read", {"path": arguments.plain_path(first), "max_bytes": max_bytes}, schema=frames.CHUNK, max_bytes=max_bytes)
        elif kind == "write":
            path, body = arguments.plain_path(first), arguments.content(_bytes(second), "data")
            desk.ask("write", {"files": [[path, len(body)]]}, body, written={path: body})
        elif kind == "exec":
            request = {**arguments.program(first, second), **arguments.limits(third, fourth)}
            frames.encode({"id": 1, "op": "exec", **request})
            must(len(work("exec", (request["argv"], request["env"]))) > 0, "an empty command")
        elif kind == "python":
            must(isinstance(arguments.code(first), bytes), "code that is not sent")
            frames.encode({"id": 1, "op": "python", "session": arguments.session_name(second), **arguments.limits(third, fourth)})
    except (ValueError, TypeError) as error:
        must(not isinstance(error, UnicodeError) and "\n" not in str(error), f"an invalid request raises another error: {error!r}")


def _bytes(value: object) -> object:
    return value.encode("utf-8", "replace") if isinstance(value, str) else value


def seeds() -> Sequence[bytes]:
    calls: list[list[Any]] = [
        ["write", "a.txt", "content"],
        ["read", "a.txt", 100],
        ["read", "a.txt", 3],
        ["write", "folder/b.txt", "more"],
        ["read", "folder", 10],
        ["write", "a.txt/b", "below a file"],
        ["read", "missing/c", 10],
        ["exec", ["python3", "-c", "print(1)"], {"A": "1"}, 1.5, 100],
        ["exec", ["a"], {"A=B": "1"}, 1, 100],
        ["python", "print(1)", "agent", 1.0, 100],
        ["write", "\ud83d", "half an emoji"],
        ["read", "x" * 300, 10],
    ]
    return [json.dumps(calls[:count]).encode() for count in (1, 2, 5, 10)] + [json.dumps([call]).encode() for call in calls]


target = Target(
    name="server",
    about="requests of the host to an exec server: names, sizes, files",
    prepare=prepare,
    seeds=seeds,
    brief=15_000,
    mutate=mutators.json_text,
    words=(b'["write",', b'["read",', b'["exec",', b'["python",', b'"\\ud800"', b'"a/b"', b"\\u0000", b'"../a"'),
)

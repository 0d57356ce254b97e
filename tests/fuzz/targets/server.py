"""The exec server's end: whatever names and sizes the host sends, the server answers with a frame that the host accepts."""

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


def _call(desk: Desk, kind: str, said: Sequence[Any]) -> None:
    """One call as `agentrl.sandbox.channel_sandbox` makes it; what that refuses is a `ValueError` or a `TypeError`."""
    one, two, three, four = (*said, None, None, None, None)[:4]
    try:
        if kind == "read":
            most = arguments.size(two, "max_bytes", MOST_BYTES)
            desk.ask("read", {"path": arguments.plain_path(one), "max_bytes": most}, schema=frames.CHUNK, most=most)
        elif kind == "write":
            path, body = arguments.plain_path(one), arguments.content(_bytes(two), "data")
            desk.ask("write", {"files": [[path, len(body)]]}, body, written={path: body})
        elif kind == "exec":
            request = {**arguments.program(one, two), **arguments.limits(three, four)}
            frames.encode({"id": 1, "op": "exec", **request})
            must(len(work("exec", (request["argv"], request["env"]))) > 0, "work without words")
        elif kind == "python":
            must(isinstance(arguments.code(one), bytes), "code that is not sent")
            frames.encode({"id": 1, "op": "python", "session": arguments.session_name(two), **arguments.limits(three, four)})
    except (ValueError, TypeError) as error:
        must(not isinstance(error, UnicodeError) and "\n" not in str(error), f"a request that is refused in other words: {error!r}")


def _bytes(said: object) -> object:
    return said.encode("utf-8", "replace") if isinstance(said, str) else said


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
    about="what the host asks of an exec server: names, sizes, files",
    prepare=prepare,
    seeds=seeds,
    brief=15_000,
    mutate=mutators.json_text,
    words=(b'["write",', b'["read",', b'["exec",', b'["python",', b'"\\ud800"', b'"a/b"', b"\\u0000", b'"../a"'),
)

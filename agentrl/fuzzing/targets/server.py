"""The exec server's end: whatever names and sizes the host can ask with, the server answers, and with a frame that the host takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError
from agentrl.fuzzing import mutators
from agentrl.fuzzing.target import Check, Target, must
from agentrl.fuzzing.targets.files import Desk
from agentrl.sandbox import frames
from agentrl.sandbox.inside.spawn import work
from agentrl.sandbox.place import plain

MOST_CALLS = 20


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
    """One call as `agentrl.sandbox.place` would make it: what it refuses itself is a `ValueError`."""
    texts = [text for text in said if isinstance(text, str)]
    path, content = (*texts, "a", "")[0], (*texts, "a", "")[-1]
    size = next((number for number in said if type(number) is int and 0 <= number < 1 << 40), 100)
    try:
        if kind == "read":
            desk.ask("read", {"path": plain(path), "max_bytes": size}, schema=frames.CHUNK, most=size)
        elif kind == "write":
            body = content.encode("utf-8", "surrogatepass")
            desk.ask("write", {"files": [[plain(path), len(body)]]}, body, written={path: body})
        elif kind == "exec":
            frames.encode({"id": 1, "op": "exec", "argv": texts, "env": dict.fromkeys(texts, "x"), "timeout_s": 1.0})
            must(len(work("exec", (texts, None))) > 0, "work without words")
    except ValueError as error:
        must(
            isinstance(error, SandboxError | ValueError) and not isinstance(error, UnicodeError), f"a name that no frame carries: {error!r}"
        )


def seeds() -> Sequence[bytes]:
    calls: list[list[Any]] = [
        ["write", "a.txt", "content"],
        ["read", "a.txt", 100],
        ["read", "a.txt", 3],
        ["write", "folder/b.txt", "more"],
        ["read", "folder", 10],
        ["write", "a.txt/b", "below a file"],
        ["read", "missing/c", 10],
        ["exec", "python3", "-c", "print(1)"],
        ["write", "\ud83d", "half an emoji"],
        ["read", "x" * 300, 10],
    ]
    return [json.dumps(calls[:count]).encode() for count in (1, 2, 5, 10)] + [json.dumps([call]).encode() for call in calls]


target = Target(
    name="server",
    about="what the host asks of an exec server: names, sizes, files",
    prepare=prepare,
    seeds=seeds,
    mutate=mutators.json_text,
    words=(b'["write",', b'["read",', b'["exec",', b'"\\ud800"', b'"a/b"', b"\\u0000", b'"../a"'),
)

"""The wire format between host and exec server, as the host reads it. No byte from a sandbox is trusted.

A frame is `!II` (length of a JSON header, length of a body), the header and the body. The host checks the lengths before it reads, and
accepts a header only if it has exactly the keys and types of the expected reply. Anything else raises `FrameError`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import NoneType
from typing import Any

from agentrl.errors import SandboxError
from agentrl.records import ExecResult
from agentrl.sandbox.inside.wire import PREFIX

MAX_REPLY_HEADER = 16384
MAX_REQUEST_HEADER = 4 << 20
CUT_MARK_BYTES = 64

Schema = Mapping[str, tuple[type, ...]]

EMPTY: Schema = {}
HELLO: Schema = {"version": (int,)}
RESULT: Schema = {"exit": (int, NoneType), "reason": (str,), "wall_s": (int, float), "truncated": (bool,), "stdout": (int,)}
SESSION_RESULT: Schema = {**RESULT, "restarted": (bool,), "ended": (bool,)}
CHUNK: Schema = {"more": (bool,)}
_FAILURE: Schema = {"error": (str,), "message": (str,)}
_ERRORS = ("not_found", "too_large", "refused", "busy", "failed")
_KILLS = ("timeout", "memory", "killed")


class FrameError(SandboxError):
    """A sandbox sent bytes that are not a valid reply, so the host destroys the sandbox."""


def encode(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Returns a request frame. Raises `ValueError` if the header or the body is too large, or the header is nested too deep or contains
    NaN, and `TypeError` if the header cannot be JSON."""
    try:
        text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError:
        raise ValueError("the request is nested too deep") from None
    if len(text) > MAX_REQUEST_HEADER:
        raise ValueError(f"a request of {len(text)} bytes is larger than {MAX_REQUEST_HEADER}; pass large data as a file or on stdin")
    if len(body) > 0xFFFFFFFF:
        raise ValueError("a request body must be smaller than 4 GiB")
    return PREFIX.pack(len(text), len(body)) + text + body


def parse_prefix(data: bytes) -> tuple[int, int]:
    """Returns (header length, body length) of a reply. The caller must limit the length of the body."""
    header_size, body_size = PREFIX.unpack(data)
    if not 2 <= header_size <= MAX_REPLY_HEADER:
        raise FrameError(f"a reply header has {header_size} bytes; 2 to {MAX_REPLY_HEADER} are allowed")
    return header_size, body_size


def parse_header(data: bytes) -> dict[str, Any]:
    """Returns a reply header with an integer `id` and a boolean `ok`. `check_fields` checks the other keys of the header."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a reply header is not JSON: {type(error).__name__}") from None
    if type(value) is not dict or type(value.get("id")) is not int or type(value.get("ok")) is not bool:
        raise FrameError("a reply header has no valid id and ok")
    return value


def check_fields(value: Mapping[str, Any], schema: Schema) -> Mapping[str, Any]:
    """Returns `value` if it has exactly the keys and types of `schema`, in addition to id and ok."""
    if value.keys() - {"id", "ok"} != schema.keys():
        raise FrameError(f"a reply has the keys {sorted(map(str, value))[:12]!r} instead of {sorted(schema)}")
    for key, kinds in schema.items():
        if type(value[key]) not in kinds:
            raise FrameError(f"field {key!r} of a reply has the wrong type {type(value[key]).__name__}")
    return value


def parse_failure(value: Mapping[str, Any]) -> tuple[str, str]:
    """Returns (kind, message) from a reply whose `ok` is false. The message is printable."""
    checked = check_fields(value, _FAILURE)
    if checked["error"] not in _ERRORS:
        raise FrameError("a reply has an unknown kind of failure")
    message = checked["message"][:500]
    return checked["error"], "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in message)


def parse_result(value: Mapping[str, Any], body: bytes) -> ExecResult:
    """Returns the result of a program, or of a call in a session, from its reply."""
    checked = check_fields(value, SESSION_RESULT if "ended" in value else RESULT)
    code, reason, wall_s, cut = checked["exit"], checked["reason"], checked["wall_s"], checked["stdout"]
    killed = code is None
    if killed != (reason in _KILLS) or (not killed and (reason != "" or not 0 <= code <= 255)):
        raise FrameError("the exit code or the reason of a program result is invalid")
    if not 0 <= wall_s <= sys.float_info.max or not 0 <= cut <= len(body):
        raise FrameError("a field of a program result is out of range")
    return ExecResult(
        exit_code=code,
        stdout=body[:cut].decode("utf-8", "replace"),
        stderr=body[cut:].decode("utf-8", "replace"),
        wall_s=float(wall_s),
        truncated=checked["truncated"],
        reason=reason,
        restarted=checked.get("restarted", False),
        session_ended=checked.get("ended", False),
    )

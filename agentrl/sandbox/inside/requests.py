"""Validation of requests, so that no argument can end the server or look like a program's failure.

The host has validated them already (`agentrl.sandbox.arguments`). An invalid request fails without other effects.
"""

from __future__ import annotations

import os

from agentrl.sandbox.inside.wire import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentrl.sandbox.inside.wire import Request


def _is_text(value: object) -> bool:
    """Whether the kernel accepts this text."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeError:
        return False
    return True


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_argv(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and bool(value) and bool(value[0])


def _is_environment(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(_is_text(name) and name and "=" not in name and _is_text(value[name]) for name in value)


def _are_files(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, list) and len(item) == 2 and _is_text(item[0]) and _is_count(item[1]) for item in value
    )


_RUN_FIELDS: Mapping[str, Callable[[object], bool]] = {"timeout_s": _is_seconds, "output_bytes": _is_count}
FIELDS: Mapping[str, Mapping[str, Callable[[object], bool]]] = {
    "exec": {"argv": _is_argv, "env": _is_environment, **_RUN_FIELDS},
    "python": {"session": lambda name: name is None or _is_text(name), **_RUN_FIELDS},
    "read": {"path": _is_text, "max_bytes": _is_count},
    "write": {"files": _are_files},
    "snapshot": {"max_bytes": _is_count},
    "restore": {},
    "pause": {},
    "resume": {},
}


def validate_request(request: Request) -> None:
    """Raises `Refused` for an unknown operation, or an invalid argument of a known one."""
    operation = request.get("op")
    if not isinstance(operation, str) or operation not in FIELDS:
        raise Refused("refused", f"unknown operation {operation!r:.100}")
    for name, is_valid in FIELDS[operation].items():
        if not is_valid(request.get(name)):
            raise Refused("refused", f"invalid {name} of {operation}")

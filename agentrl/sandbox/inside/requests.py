"""Requests judged before they are carried out, so that no argument, whoever thought of it, can end the server or look like a program.

The host has judged them already (`agentrl.sandbox.arguments`); what is wrong here fails its own call and nothing else.
"""

from __future__ import annotations

import os

from agentrl.sandbox.inside.wire import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentrl.sandbox.inside.wire import Request


def is_text(value: object) -> bool:
    """Whether it is text that the kernel takes."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeError:
        return False
    return True


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def is_argv(value: object) -> bool:
    return isinstance(value, list) and all(map(is_text, value)) and bool(value) and bool(value[0])


def is_environment(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(is_text(name) and name and "=" not in name and is_text(value[name]) for name in value)


def is_session(value: object) -> bool:
    return value is None or is_text(value)


def are_files(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, list) and len(item) == 2 and is_text(item[0]) and is_count(item[1]) for item in value
    )


RUN_FIELDS: Mapping[str, Callable[[object], bool]] = {"timeout_s": is_seconds, "output_bytes": is_count}
FIELDS: Mapping[str, Mapping[str, Callable[[object], bool]]] = {
    "exec": {"argv": is_argv, "env": is_environment, **RUN_FIELDS},
    "python": {"session": is_session, **RUN_FIELDS},
    "read": {"path": is_text, "max_bytes": is_count},
    "write": {"files": are_files},
    "snapshot": {"max_bytes": is_count},
    "restore": {},
    "pause": {},
    "resume": {},
}


def judge(request: Request) -> None:
    """Raises `Refused` unless the request is for an operation that exists, with arguments that it can have."""
    operation = request.get("op")
    if not isinstance(operation, str) or operation not in FIELDS:
        raise Refused("refused", f"no operation {operation!r:.100}")
    for name, right in FIELDS[operation].items():
        if not right(request.get(name)):
            raise Refused("refused", f"{operation} cannot have this {name}")

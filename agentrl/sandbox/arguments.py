"""Validates the arguments of a sandbox's methods before they are sent to its exec server.

Tools pass file names, program arguments and environment variables that an agent wrote. An invalid value raises `ValueError`, and a value of
the wrong type raises `TypeError`; neither affects the sandbox. A string represents bytes as in `os.fsdecode`, so every possible file name
can be expressed. A lone surrogate that represents no byte is invalid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

MAX_READ_BYTES = (1 << 32) - 1
_MAX_OUTPUT_BYTES = 1 << 30
_MAX_NAMES = 64  # maximum number of names in a path
_NAME_BYTES = 255  # maximum length of one name, the kernel's limit
_SESSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def plain_path(path: object) -> str:
    """Returns `path` if it is relative and has at most 64 components of at most 255 bytes, none of which is empty, `.` or `..`."""
    if not isinstance(path, str):
        raise TypeError(f"a path must be a string, not {type(path).__name__}")
    names = path.split("/", _MAX_NAMES)
    if len(names) > _MAX_NAMES or any(name in ("", ".", "..") for name in names) or "\0" in path:
        raise ValueError(f"{_quoted(path)} is not a plain path relative to the working directory")
    if any(len(_encoded(name, "a path")) > _NAME_BYTES for name in names):
        raise ValueError(f"{_quoted(path)} is not a plain path: a name in it has more than {_NAME_BYTES} bytes")
    return path


def program(argv: object, env: object) -> dict[str, object]:
    """Returns the request fields for the program `argv`. `env` contains variables that are added to the environment of the program."""
    if not isinstance(argv, Sequence) or isinstance(argv, str | bytes | bytearray):
        raise TypeError(f"argv must be a list of strings, not {type(argv).__name__}")
    strings = [_string(item, "argv") for item in argv]
    if not strings or not strings[0]:
        raise ValueError("argv must start with the name of a program")
    if env is None or env == {}:
        return {"argv": strings, "env": None}
    if not isinstance(env, Mapping):
        raise TypeError(f"env must map strings to strings, not be {type(env).__name__}")
    variables = {_string(name, "env"): _string(value, "env") for name, value in env.items()}
    for name in variables:
        if not name or "=" in name:
            raise ValueError(f"{_quoted(name)} cannot name an environment variable: it is empty or contains =")
    return {"argv": strings, "env": variables}


def code(text: object) -> bytes:
    """Returns Python source as bytes. The source is not checked, because the interpreter reports invalid source, such as a lone
    surrogate."""
    if not isinstance(text, str):
        raise TypeError(f"code must be a string, not {type(text).__name__}")
    return text.encode("utf-8", "surrogatepass")


def session_name(name: object) -> str | None:
    """Returns `name` if it is a valid session name, or None if it is empty."""
    if not isinstance(name, str):
        raise TypeError(f"a session name must be a string, not {type(name).__name__}")
    if name and not _SESSION_NAME.fullmatch(name):
        raise ValueError(f"a session name has up to 64 letters, digits, `_` and `-`; got {_quoted(name)}")
    return name or None


def limits(timeout_s: object, output_bytes: object) -> dict[str, object]:
    """Returns the request fields that limit a program's run time and the number of bytes kept from each output stream."""
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool):
        raise TypeError(f"timeout_s must be a number, not {type(timeout_s).__name__}")
    try:
        seconds = float(timeout_s)
    except OverflowError:
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"timeout_s must be positive and finite, got {seconds}")
    return {"timeout_s": seconds, "output_bytes": size(output_bytes, "output_bytes", _MAX_OUTPUT_BYTES)}


def size(value: object, name: str, limit: int) -> int:
    """Returns `value` if it is a number of bytes from 0 to `limit`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if not 0 <= value <= limit:
        raise ValueError(f"{name} must be from 0 to {limit}")
    return int(value)


def content(data: object, name: str) -> bytes:
    """Returns `data` as bytes."""
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"{name} must be bytes, not {type(data).__name__}")
    return bytes(data)


def contents(files: object) -> dict[str, bytes]:
    """Returns the files as a mapping path -> content."""
    if not isinstance(files, Mapping):
        raise TypeError(f"files must map paths to bytes, not be {type(files).__name__}")
    return {plain_path(path): content(data, "the content of a file") for path, data in files.items()}


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{where} must contain strings, not {type(value).__name__}")
    if "\0" in value:
        raise ValueError(f"{where} must not contain NUL characters")
    _encoded(value, where)
    return value


def _encoded(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} contains {text[error.start]!r}, half a surrogate pair, which represents no bytes") from None


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")

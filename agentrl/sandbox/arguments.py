"""What callers may ask of a sandbox, judged before any of it becomes a frame.

A tool hands on what an agent wrote: as a name of a file, an argument, a variable. Whatever that is, the sandbox must outlive it, so
what cannot be carried is refused here: with `ValueError`, and with `TypeError` for another type than the one asked for. The exec
server judges once more (`agentrl.sandbox.inside.requests`).

Text stands for bytes as everywhere in Python (`os.fsdecode`): UTF-8, and U+DC80 to U+DCFF for single bytes that are none. So every
name that a file can have can be said. Half a surrogate pair stands for nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

MAX_NAMES = 64
"""Names in a path: the folders above a file, and its own."""
NAME_BYTES = 255
"""Of one name in a path, as the kernel has it."""
MAX_OUTPUT_BYTES = 1 << 30
MAX_READ_BYTES = (1 << 32) - 1
SESSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def plain_path(path: object) -> str:
    """`path` when it is relative and stays in the working directory without `.` or `..`."""
    if not isinstance(path, str):
        raise TypeError(f"a path is text, not {type(path).__name__}")
    parts = path.split("/", MAX_NAMES)
    if len(parts) > MAX_NAMES or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ValueError(f"{_shown(path)} is not a plain path relative to the working directory")
    if any(len(_bytes(part, "a path")) > NAME_BYTES for part in parts):
        raise ValueError(f"{_shown(path)} is not a plain path: a name in it has more than {NAME_BYTES} bytes")
    return path


def program(argv: object, env: object) -> dict[str, object]:
    """The frame's fields for a program with these arguments and these variables on top of its environment."""
    if not isinstance(argv, Sequence) or isinstance(argv, str | bytes | bytearray):
        raise TypeError(f"argv is a list of texts, not {type(argv).__name__}")
    words = [_word(word, "argv") for word in argv]
    if not words or not words[0]:
        raise ValueError("argv must begin with the name of a program")
    if env is None or env == {}:
        return {"argv": words, "env": None}
    if not isinstance(env, Mapping):
        raise TypeError(f"env is a mapping of texts to texts, not {type(env).__name__}")
    variables = {_word(name, "env"): _word(value, "env") for name, value in env.items()}
    for name in variables:
        if not name or "=" in name:
            raise ValueError(f"{_shown(name)} is no name of an environment variable: it must not be empty or hold =")
    return {"argv": words, "env": variables}


def code(text: object) -> bytes:
    """Source of Python as it is sent. What is no Python, half a surrogate pair included, is for the interpreter to say."""
    if not isinstance(text, str):
        raise TypeError(f"code is text, not {type(text).__name__}")
    return text.encode("utf-8", "surrogatepass")


def session_name(name: object) -> str | None:
    """None for no session."""
    if not isinstance(name, str):
        raise TypeError(f"a session's name is text, not {type(name).__name__}")
    if name and not SESSION_NAME.fullmatch(name):
        raise ValueError(f"a session is named by up to 64 letters, digits, `_` and `-`, not {_shown(name)}")
    return name or None


def limits(timeout_s: object, output_bytes: object) -> dict[str, object]:
    """The frame's fields for how long a program may run, and how much of its output is kept."""
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool):
        raise TypeError(f"timeout_s is a number, not {type(timeout_s).__name__}")
    try:
        seconds = float(timeout_s)
    except OverflowError:
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"timeout_s must be positive and finite, got {seconds}")
    return {"timeout_s": seconds, "output_bytes": size(output_bytes, "output_bytes", MAX_OUTPUT_BYTES)}


def size(value: object, name: str, most: int) -> int:
    """A number of bytes."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a whole number, not {type(value).__name__}")
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be from 0 to {most}")
    return int(value)


def content(data: object, name: str) -> bytes:
    """Bytes as they are sent."""
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"{name} is bytes, not {type(data).__name__}")
    return bytes(data)


def contents(files: object) -> dict[str, bytes]:
    """Contents of files by path, as they are sent."""
    if not isinstance(files, Mapping):
        raise TypeError(f"files are a mapping of paths to bytes, not {type(files).__name__}")
    return {plain_path(path): content(data, "the content of a file") for path, data in files.items()}


def _word(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{where} holds texts, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{where} must not hold NUL characters")
    _bytes(text, where)
    return text


def _bytes(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds {text[error.start]!r}, half a surrogate pair, which stands for no bytes") from None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")

"""Short descriptions of an exception, of a chain or group of exceptions, or of the errors in another program's log.

This module also writes the error messages for values that do not validate.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sqlite3
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path

from pydantic import ValidationError

from agentrl.base import secrets
from agentrl.errors import AgentRLError, DiskFull, UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "database or disk is full")
_TORCH_WRITES = re.compile(r"PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos")  # without the reason
_MAX_CAUSE = 600  # characters of one cause
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders of packages in this environment and in those below it
_LIBRARIES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


def group_members(error: BaseException) -> Iterator[BaseException]:
    """Yields the members of an exception group in order; for any other error, yields the error."""
    pending = [error]
    while pending:  # avoids recursion, because groups may be nested deeply
        one = pending.pop()
        if isinstance(one, BaseExceptionGroup):
            pending += reversed(one.exceptions)
        else:
            yield one


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, the members of a group, and all their causes and contexts, each once."""
    pending, seen = [error], set()
    while pending:
        one = pending.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        pending += [*(one.exceptions if isinstance(one, BaseExceptionGroup) else ()), *filter(None, (one.__cause__, one.__context__))]


def disk_full_error(error: BaseException) -> BaseException | None:
    """Returns the error in the chain of `error` that reports a full disk or quota; None if there is none."""
    return next((cause for cause in error_chain(error) if _says_full(cause)), None)


def _says_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF == sqlite3.SQLITE_FULL:
        return True
    text = raw_text(error)
    return isinstance(error, DiskFull) or any(phrase in text for phrase in _FULL_TEXTS) or _TORCH_WRITES.search(text) is not None


def main_error(error: BaseException) -> BaseException:
    """Returns the member of an exception group to show: one that a full disk caused, else the first `UserError`, else the first of
    agentrl's errors, else the first member. Any other error is returned unchanged."""
    errors = list(group_members(error))
    if any(disk_full_error(cause) for cause in errors):
        return next(cause for cause in errors if disk_full_error(cause))
    for kind in (UserError, AgentRLError):
        for cause in errors:
            if isinstance(cause, kind):
                return cause
    return errors[0]


def one_line_error(error: BaseException) -> str:
    """Returns `Type: message`, or `Type` if the message is empty. Shortened as by `clip_text`, so up to six lines remain."""
    return clip_text(f"{type(error).__name__}: {raw_text(error)}".removesuffix(": "))


def raw_text(error: BaseException) -> str:
    """Returns the text of an exception, or a fixed text if its `__str__` raises."""
    try:
        return str(error)
    except BaseException:  # raised, for instance, by a number too long to print
        return "(its text cannot be shown)"


def reason_text(error: BaseException) -> str:
    """Returns the text of an exception for a message that contains the path: for an `OSError`, without its number and its path."""
    return getattr(error, "strerror", None) or raw_text(error)


def raise_location(error: BaseException, *, libraries: bool = False) -> str:
    """Returns the `file:line` at which an error was raised: the innermost line of user-supplied code, else of agentrl, else "".

    For a SyntaxError in a file, returns the line with the error.

    Args:
        libraries: whether to fall back to a line in a third-party package instead of one in agentrl.
    """
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and os.path.isfile(error.filename) and error.lineno is not None:
        return f"{display_path(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.isfile(frame.filename)]
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE) and not _of_a_library(frame.filename)]
    fallback = [frame for frame in frames if frame.filename.startswith(_PACKAGE) is not libraries]
    known = theirs or fallback
    return f"{display_path(known[-1].filename)}:{known[-1].lineno}" if known else ""


def _of_a_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(Path(path).parts)


def display_path(path: str) -> str:
    """Returns a path for display: relative if it is below the current directory, otherwise unchanged."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path


def clip_text(text: str) -> str:
    """Shortens a string to six lines and 600 characters."""
    clipped = "\n".join(text.strip().splitlines()[:6])
    return clipped if len(clipped) <= _MAX_CAUSE else clipped[: _MAX_CAUSE - 3] + "..."


_KNOWN = (  # pattern in a log, its cause, and the fix
    (re.compile(r"No space left on device|Disk quota exceeded"), "the disk is full", "free space"),
    (
        re.compile(r"CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"),
        "the GPU is out of memory",
        "lower serving.gpu_memory_utilization, policy.max_model_len or learner.max_tokens_per_microbatch",
    ),
    (
        re.compile(r"Cannot allocate memory|can't allocate memory|std::bad_alloc|MemoryError"),
        "the machine is out of memory",
        "lower serving.kv_cache_gb or policy.max_model_len, or free memory",
    ),
    (
        re.compile(r"Address already in use"),
        "its port is in use",
        "stop the program that uses it, or start the run again: it then chooses a different port",
    ),
)
_PREFIX = re.compile(r"^(?:\([^()]*pid=\d+\) ?)?(?:(?:ERROR|CRITICAL|WARNING|INFO) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?(?:[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Halted)|OutOfMemoryError)(?::|$)")
# Errors that only refer to an error in another process.
_WRAPPERS = re.compile(
    r"Engine core initialization failed|See root cause above|ChildFailedError|EngineDeadError|WorkerProc initialization failed"
)


def cause_in_log(text: str) -> tuple[str, str]:
    """Returns the cause of a failure that a log reports, and the fix, which may be "".

    The cause is a known cause, else the last traceback or `error:` line, else the last line.

    Ignores errors that only refer to an error in a different process. Returns ("", "") for an empty log.
    """
    for pattern, cause, fix in _KNOWN:
        if pattern.search(text):
            return cause, fix
    lines = [_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    raised = [
        number for number, line in enumerate(lines) if (line.startswith("error: ") or _RAISED.match(line)) and not _WRAPPERS.search(line)
    ]
    if raised:
        return clip_text("\n".join(_message(lines, raised[-1]))), ""
    last = next((line for line in reversed(lines) if line.strip() and not _WRAPPERS.search(line)), "")
    return clip_text(last), ""


def _message(lines: list[str], start: int) -> Iterator[str]:
    """Yields the first line of an error and the indented lines of its message; for a pydantic error, only the message."""
    following = lines[start + 1] if start + 1 < len(lines) else ""
    if "ValidationError" in lines[start] and following.startswith("  Value error, "):
        yield following.removeprefix("  Value error, ")
        return
    yield lines[start]
    for line in lines[start + 1 :]:
        if not line.startswith("  "):
            return
        yield line


def validation_text(error: ValidationError) -> str:
    """Returns the errors of a pydantic validation as text, one line per key. Keys in a single section start with its class, as in
    `LearnerConfig.lr`."""
    lines = []
    for item in error.errors(include_url=False):
        path = [*([] if error.title == "Recipe" else [error.title]), *item["loc"]]
        message = item["msg"].removeprefix("Value error, ")
        unknown = item["type"] in ("extra_forbidden", "unexpected_keyword_argument", "missing")
        shown = not unknown and not isinstance(item["input"], dict) and not is_dataclass(item["input"])
        if item["loc"] and shown and not any(secrets.literal_secret_errors({str(path[-1]): item["input"]})) and "env" not in path:
            message = f"{message} (got {shortened(item['input'])})"  # the message for a complete section contains the keys
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        lines.append(f"{where or 'recipe'}: {message}")
    return "\n".join(lines)


def shortened(value: object) -> str:
    """Returns the `repr` of a value for an error message, cut to 200 characters; `HIDDEN` if the value contains a secret."""
    shown = secrets.HIDDEN if any(secrets.literal_secret_errors(value)) else repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def unknown_name(key: str, known: Iterable[str], *, what: str = "key", elsewhere: Sequence[str] = ()) -> str:
    """Returns the message for an unknown key, which lists similar and known keys. `elsewhere`: dotted keys with this name in nested
    sections."""
    names = sorted(known)
    near = f"did you mean {' or '.join(elsewhere[:2])}? " if elsewhere else did_you_mean(key, names, "{}? ")
    return f"unknown {what}; {near}known here: {', '.join(names)}"


def did_you_mean(name: str, known: Iterable[str], form: str) -> str:
    """Returns `did you mean NAME`, inserted into the format string `form`; empty if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.65)
    return form.format(f"did you mean {' or '.join(near)}") if near else ""

"""What a forked child runs as the agent: a program, or Python code in its own interpreter."""

from __future__ import annotations

import atexit
import collections
import contextlib
import csv
import datetime
import errno
import os
import re
import signal
import sys
import types

from agentrl.sandbox.inside.users import ENVIRONMENT

# Imported so that snippets, which are forked from this process, find these modules loaded.
_PRELOADED = (collections, csv, datetime, re)
_NOWHERE = "/dev/null/nowhere"


def run_argv(argument: tuple[list[str], dict[str, str] | None]) -> int:
    """Replaces this process by a program. Returns a shell's exit status if that fails."""
    argv, changes = argument
    environment = {**ENVIRONMENT, **(changes or {})}
    refused: int | None = errno.ENOENT
    for path in candidates(argv[0], environment):
        try:
            os.execve(path, argv, environment)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refused = error.errno
    os.write(2, (f"agentrl: {argv[0]}: {os.strerror(refused or 0)}\n").encode("utf-8", "replace"))
    return 126 if refused == errno.EACCES else 127


def candidates(name: str, environment: dict[str, str]) -> list[str]:
    """Where a program of this name may be, as in `os.execvpe`, which takes a millisecond to import `warnings`."""
    if "/" in name:
        return [name]
    return [f"{folder}/{name}" for folder in environment.get("PATH", os.defpath).split(":")]


def reset_interpreter() -> None:
    """Gives this interpreter, before it has run any code, the state in which `python3 -I -c` starts."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main


def rehearse(kind: str) -> None:
    """Performs an empty piece of work of this kind, which copies the shared pages that it writes to ahead of time."""
    if kind == "exec":
        with contextlib.suppress(OSError):
            os.execve(_NOWHERE, [_NOWHERE], ENVIRONMENT)
    else:
        exec(compile("len(())", "<string>", "exec", dont_inherit=True), {})
        sys.stdout.flush()


def set_signal_handlers() -> None:
    """Handles signals as an interpreter does."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_snippet(code: bytes) -> int:
    """Runs `code` in this forked interpreter as `python3 -I -c` does. Returns the exit status."""
    set_signal_handlers()
    status = 0
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    except SystemExit as stop:
        status = exit_status(stop)
    except BaseException as error:
        status = 1
        report(error)
    return finish(status)


def report(error: BaseException) -> None:
    """Prints an uncaught exception as the interpreter does, without this file's frame."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)


def exit_status(stop: SystemExit) -> int:
    """The exit status of an interpreter that ends with `stop`. Prints its message."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def finish(status: int) -> int:
    """Ends an interpreter: waits for threads, runs exit handlers, flushes. Returns the exit status."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:  # the program may have replaced the stream
            status = status or 120
    return status

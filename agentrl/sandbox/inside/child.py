"""What a forked child runs as the agent: a program, or a snippet of Python in the interpreter that it is."""

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

# Imported here only to be warm in the snippets that are forked from this process.
WARM = (collections, csv, datetime, re)
NOWHERE = "/dev/null/nowhere"


def run_argv(argument: tuple[list[str], dict[str, str] | None]) -> int:
    """Becomes the program; gives the exit status of a shell when there is none to become."""
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
    """Where a program of that name may be. `os.execvpe` looks there too, and takes a millisecond to import what it warns with."""
    if "/" in name:
        return [name]
    return [f"{folder}/{name}" for folder in environment.get("PATH", os.defpath).split(":")]


def look_like_an_interpreter() -> None:
    """Makes this interpreter, before it has run anyone's code, what `python3 -I -c` would find itself in."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main


def rehearse(kind: str) -> None:
    """Goes through the motions of such work: the pages that it writes to are then this process's own, not still to be copied."""
    if kind == "exec":
        with contextlib.suppress(OSError):
            os.execve(NOWHERE, [NOWHERE], ENVIRONMENT)
    else:
        exec(compile("len(())", "<string>", "exec", dont_inherit=True), {})
        sys.stdout.flush()


def heed_signals() -> None:
    """Signals as an interpreter has them."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_snippet(code: bytes) -> int:
    """What `python3 -I -c` does with `code`, in this forked interpreter; gives the exit status."""
    heed_signals()
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
    """Prints an uncaught exception as the interpreter does, without this file's own frame."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)


def exit_status(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def finish(status: int) -> int:
    """The end of an interpreter: waits for threads, runs exit handlers, flushes."""
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
        except BaseException:  # whatever the program has put there
            status = status or 120
    return status

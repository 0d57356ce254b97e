"""What a forked child does to become a program: between fork and exec, or as a snippet of Python without an exec."""

from __future__ import annotations

import collections
import csv
import datetime
import errno
import os
import re
import signal
import sys
import types

from agentrl.sandbox.inside.users import ENVIRONMENT, HOME, SERVER_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from agentrl.sandbox.inside.users import Users
    from agentrl.sandbox.inside.wire import Request

# Imported here only to be warm in the snippets that are forked from this process.
WARM = (collections, csv, datetime, re)


def become_program(users: Users, stdin: int | None, stdout: int, stderr: int, child: Callable[[], int]) -> NoReturn:
    """Turns a forked child into the leader of a session of its own with its own pipes, and never returns."""
    status = 70
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(stdin if stdin is not None else os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, SERVER_FILES)
        users.become_agent()
        os.chdir(HOME)
        status = child()
    except OSError as error:
        os.write(2, (f"agentrl: {error}\n").encode())
    finally:
        os._exit(status)


def run_argv(request: Request) -> int:
    argv = request["argv"]
    environment = {**ENVIRONMENT, **(request["env"] or {})}
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, (f"agentrl: {argv[0]}: {error.strerror}\n").encode("utf-8", "replace"))
        return 126 if error.errno == errno.EACCES else 127


def run_snippet(code: bytes) -> int:
    """What `python3 -I -c` does with `code`, in this forked interpreter; gives the exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    status = 0
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), main.__dict__)
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
        import atexit

        atexit._run_exitfuncs()
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            status = status or 120
    return status

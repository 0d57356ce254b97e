"""Explains why a third-party package could not be loaded, with the command that adds a missing package to its environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import sys

from host_channel import describe_error

MAX_CHAIN = 20
_OFFLINE = ("huggingface", "offline", "connection", "name resolution", "resolve host", "network is unreachable", "max retries")


def load_hint(error: BaseException) -> str:
    """Returns the likely cause of a failed load, with the command that corrects it; empty if the cause is unknown."""
    chain = [error]
    while len(chain) < MAX_CHAIN:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None:
            break
        chain.append(cause)
    text = " ".join(f"{type(cause).__module__} {describe_error(cause)}" for cause in chain).lower()
    if not isinstance(error, ImportError) and any(word in text for word in _OFFLINE):
        return "; if it loads data from a hub, the hub cannot be reached"
    missing = (cause.name for cause in chain if isinstance(cause, ModuleNotFoundError) and cause.name)
    return _hint_for_module(str(next(missing, "")))


def _hint_for_module(module: str) -> str:
    """Returns a hint with the command that adds a module's package to this environment; empty if `module` cannot be the name of a module in
    a package."""
    package = module.partition(".")[0]
    if not package.isidentifier() or not module.replace(".", "_").isidentifier() or package in sys.stdlib_module_names:
        return ""  # the name comes from an exception and becomes part of a command
    installed = package in sys.modules
    with contextlib.suppress(Exception):  # the package's finder may raise anything
        installed = installed or importlib.util.find_spec(package) is not None
    if installed:
        return f"; the installed {package} has no {module}: if another version has it, run {add_command(package, '==VERSION')}"
    return f"; unless {package} is a module of the project, add the package that contains it, for example: {add_command(package)}"


def add_command(package: str, version: str = "") -> str:
    """Returns the command that adds a package to this environment or changes its version. The command repeats the earlier requirements,
    which are listed in `agentrl.lock`."""
    requested: list[str] = []
    with contextlib.suppress(OSError), open(os.path.join(sys.prefix, "agentrl.lock"), encoding="utf-8") as lock:
        requested = [line.removeprefix("# requires: ").strip() for line in lock if line.startswith("# requires: ")]
    others = [
        requirement
        for requirement in requested
        if re.split(r"[^A-Za-z0-9._-]", requirement)[0].replace("-", "_").lower() != package.lower()
    ]
    return f"agentrl env add {shlex.join([*others, package + version])} --name {os.path.basename(sys.prefix)}"

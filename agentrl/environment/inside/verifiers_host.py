"""Runs the tasks of one verifiers package as episodes: tasksets (verifiers 0.4), or `load_environment` (verifiers 0.3).

The package's own environment plays each episode. Model calls go to the gateway with the episode's key, and the package's rewards determine
the score.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from host_channel import TASK, Caller, Channel, Fault, describe_error, main
from load_hints import add_command, load_hint


def load(config: dict[str, Any]) -> Any:
    """Returns the adapter for a package: `verifiers_tasksets.Taskset` or `verifiers_legacy.Legacy`. Raises `Fault` if the package cannot be
    loaded, or if it needs a version of verifiers that is not installed."""
    sys.path.append(str(Path(__file__).parent))  # last, so that this folder hides no module of the package
    name = config["package"]
    package = _import(name)
    legacy = hasattr(package, "load_environment") and not _exports_taskset(package)
    needed, wanted = ("verifiers.legacy", ">=0.3,<0.4") if legacy else ("verifiers.v1.harnesses.utils", ">=0.4")
    if not _has_module(needed):
        why = (
            "needs verifiers 0.3, because it has load_environment" if legacy else "needs verifiers 0.4, because it has no load_environment"
        )
        installed = "none"
        with contextlib.suppress(PackageNotFoundError):
            installed = version("verifiers")
        environment = f".environments/{Path(sys.prefix).name}"
        raise Fault(TASK, f"{name} {why}, but {environment} has {installed}: run {add_command('verifiers', wanted)}")
    if legacy:
        from verifiers_legacy import Legacy

        return Legacy(config)
    from verifiers_tasksets import Taskset

    return Taskset(config)


def _exports_taskset(package: Any) -> bool:
    """Returns whether `__all__` lists a taskset class of the package `verifiers` 0.4. Packages for 0.3 may also define `__all__`."""
    exported = []
    names = getattr(package, "__all__", ())
    for name in names if isinstance(names, list | tuple) else ():
        with contextlib.suppress(Exception):  # a lazy import may raise anything
            exported.append(getattr(package, str(name)))
    return any(isinstance(each, type) and any(base.__name__ == "Taskset" for base in each.__mro__) for each in exported)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise Fault(TASK, f"{name} cannot be imported: {describe_error(error)}{load_hint(error)}") from error
        return False  # a parent package is missing


def _import(name: str) -> Any:
    """Imports a package as verifiers does: a taskset that is part of verifiers, or else a module."""
    module = name.replace("-", "_").lower()
    verifiers = importlib.util.find_spec("verifiers")
    inside = [Path(folder, "v1", "tasksets", module) for folder in (verifiers and verifiers.submodule_search_locations) or ()]
    try:
        return importlib.import_module(f"verifiers.v1.tasksets.{module}" if any(path.exists() for path in inside) else module)
    except BaseException as error:
        raise Fault(TASK, f"{module} cannot be imported: {describe_error(error)}{load_hint(error)}") from error


ADAPTER: asyncio.Future[Any] | None = None


def describe(config: dict[str, Any]) -> Any:
    """Returns the tasks of a package. Raises `Fault` if there are none, or if the package or its tasks cannot be loaded."""
    tasks = load(config).describe()
    if not tasks:
        raise Fault(TASK, f"{config['package']} has no tasks")
    return {"tasks": tasks}


async def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Serves episodes until the channel closes."""
    adapter = load(config)
    await adapter.serve(lambda: _adapter().set_result(adapter))


async def play(params: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Plays one episode."""
    adapter = await asyncio.shield(_adapter())
    result: dict[str, Any] = await adapter.play(params, caller)
    return result


def _adapter() -> asyncio.Future[Any]:
    """Returns a future whose result is the adapter. The result is set when the adapter is ready to serve."""
    global ADAPTER
    if ADAPTER is None:
        ADAPTER = asyncio.get_running_loop().create_future()
    return ADAPTER


if __name__ == "__main__":
    main(describe, serve, play)

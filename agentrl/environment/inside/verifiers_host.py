"""Runs the tasks of one package for verifiers as episodes: tasksets of 0.4, or `load_environment` of 0.3.

The package's own environment plays each episode. Its model calls go to the gateway with the episode's key, and its rewards are the score.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from host_channel import TASK, Caller, Channel, Fault, describe_error, main


def load(config: dict[str, Any]) -> Any:
    """Returns the adapter of a package: `verifiers_tasksets.Taskset`, or `verifiers_legacy.Legacy`. Raises `Fault`."""
    sys.path.append(str(Path(__file__).parent))  # last, so that it hides no module of the package
    name = config["package"]
    package = _import(name)
    legacy = not hasattr(package, "__all__") and hasattr(package, "load_environment")
    if legacy and importlib.util.find_spec("verifiers.legacy") is None:
        raise Fault(TASK, f"{name} has load_environment, so it is for verifiers 0.3: agentrl env add {name} 'verifiers<0.4'")
    if legacy:
        from verifiers_legacy import Legacy

        return Legacy(config)
    from verifiers_tasksets import Taskset

    return Taskset(config)


def _import(name: str) -> Any:
    """Imports a package as verifiers does: a taskset that it contains, else a module."""
    module = name.replace("-", "_").lower()
    verifiers = importlib.util.find_spec("verifiers")
    inside = [Path(folder, "v1", "tasksets", module) for folder in (verifiers and verifiers.submodule_search_locations) or ()]
    try:
        return importlib.import_module(f"verifiers.v1.tasksets.{module}" if any(path.exists() for path in inside) else module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise Fault(TASK, f"{module} cannot be imported: {describe_error(error)}: agentrl env add {name} {missing}") from error
    except BaseException as error:
        raise Fault(TASK, f"{module} cannot be imported: {describe_error(error)}") from error


ADAPTER: asyncio.Future[Any] | None = None


def describe(config: dict[str, Any]) -> Any:
    """Returns the tasks of a package."""
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
    """The adapter, once it serves."""
    global ADAPTER
    if ADAPTER is None:
        ADAPTER = asyncio.get_running_loop().create_future()
    return ADAPTER


if __name__ == "__main__":
    main(describe, serve, play)

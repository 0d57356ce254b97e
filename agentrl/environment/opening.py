"""Opens the environment of a task. The environment's reference starts with the prefix of a kind of environment, or refers to a
user-supplied class."""

from __future__ import annotations

import asyncio
import inspect
from typing import cast
from weakref import WeakKeyDictionary

from agentrl.environment.base import Environment as EnvironmentClass
from agentrl.environment.guard import GuardedEnvironment, blaming_environment, guarded
from agentrl.environment.pool import ProcessPool
from agentrl.errors import PluginError
from agentrl.plugins.parts import environment_kind
from agentrl.plugins.references import resolve
from agentrl.protocols import Environment, EnvironmentOpener
from agentrl.records import EnvironmentSpec

REMOTE_OPENER = "agentrl.environment.remote:RemoteOpener"
_openers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, EnvironmentOpener]] = WeakKeyDictionary()


async def open_environment(spec: EnvironmentSpec, *, alone: bool = False) -> Environment:
    """Returns an environment for one episode. The caller must close the environment. `alone`: see `ProcessPool.open`.

    Raises `EnvironmentFault` if the environment fails, `TaskError` if the task cannot be played, `PluginError` if the reference does not
    refer to an environment that the turn loop can open, and `UserError` if a server's option is invalid or a secret cannot be read.
    """
    opened = _openers.setdefault(asyncio.get_running_loop(), {})
    kind = kind_of(spec.ref)
    if kind not in opened:
        with blaming_environment(f"opening {kind}"):
            opened[kind] = resolve(kind)() if kind else cast(EnvironmentOpener, ProcessPool())
    opener = opened[kind]
    if isinstance(opener, ProcessPool):
        return cast(Environment, await opener.open(spec, alone=alone))
    if kind != spec.ref:
        return await opener.open(spec)
    environment = await guarded(lambda: opener.open(spec), f"opening {kind}")
    with blaming_environment(f"opening {kind}"):
        environment = GuardedEnvironment(environment, kind)
    return environment


def is_resumable(environment: Environment) -> bool:
    """Whether an environment supports snapshots."""
    return bool(getattr(environment, "resumable", hasattr(environment, "snapshot")))


def kind_of(ref: str) -> str:
    """Returns the plug-in reference of the opener; empty for the process pool. Raises `PluginError` if the turn loop cannot open the
    environment."""
    if (known := environment_kind(ref)) is not None:
        if known.host:
            raise PluginError(
                f"the program of {ref!r} drives the model, so the turn loop cannot play it",
                fix="use the recipe of its tasks, with the default rollout.agent",
            )
        return REMOTE_OPENER if known.session else ""
    target = resolve(ref)
    if inspect.isclass(target) and issubclass(target, EnvironmentClass):
        return ""
    if inspect.isclass(target) and callable(getattr(target, "open", None)):
        return ref
    raise PluginError(
        f"{ref!r} is not an environment",
        fix="specify a subclass of agentrl.environment.Environment, or a class with the methods of agentrl.protocols.EnvironmentOpener",
    )


async def close_environments() -> None:
    """Frees the resources that the environments in this event loop share. Environments that are still open fail at their next call."""
    for opener in _openers.pop(asyncio.get_running_loop(), {}).values():
        await opener.close()

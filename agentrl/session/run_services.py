"""Opens the interface through which parts on other machines reach a run's driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from agentrl.cluster.file_service import FileService
from agentrl.cluster.object_store import OPTION, ObjectStore
from agentrl.cluster.ray_host import run_id
from agentrl.cluster.run_service import HOST, RunService
from agentrl.config.recipe import Recipe
from agentrl.errors import InfrastructureError, UserError
from agentrl.experience import DriverStore
from agentrl.learner.learner_api import LearnerApi, LearnerSessions
from agentrl.plugins import parts
from agentrl.protocols import Launcher
from agentrl.version import FolderRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """The interface of the driver, and the keys for learners; None if learners have the run folder."""

    service: RunService
    sessions: LearnerSessions | None = None


async def open_services(
    stack: AsyncExitStack,
    recipe: Recipe,
    folder: Path,
    store: DriverStore,
    launcher: Launcher,
    *,
    judges: Mapping[str, Path],
    alert: Callable[[str], None],
) -> RunServices:
    """Creates the interface, and opens it if some parts do not share the run folder. Otherwise, the first part that needs the interface
    opens it.

    `judges`: model folders of judge servers by name. `alert`: called with a message for the user.

    Raises `InfrastructureError` if the driver's address is not available, and `UserError` if the recipe's object store is not available or
    not used.
    """
    service = RunService(host=launcher.driver_host)
    objects = await _open_store(stack, recipe, folder, launcher, alert)
    if launcher.shared_folder:
        return RunServices(service=service)
    files = FileService(folder, judges=judges, store=objects, alert=alert)
    service.add([*files.routes(), *LearnerApi(folder, store, FolderRegistry(folder / "versions")).routes()])
    await stack.enter_async_context(service.serving())
    await launcher.use_driver(service.url, service.new_key(HOST))
    return RunServices(service=service, sessions=LearnerSessions(service, files))


async def _open_store(
    stack: AsyncExitStack, recipe: Recipe, folder: Path, launcher: Launcher, alert: Callable[[str], None]
) -> ObjectStore | None:
    transfer = recipe.serving.weight_transfer
    if transfer.ref not in parts.CHANNEL.shipped or "store" not in transfer.options:
        return None
    if launcher.shared_folder:
        raise UserError(
            f"{OPTION} does nothing: all nodes share the run folder", fix="remove it, or use nodes that do not share the folder"
        )
    objects = ObjectStore(f"{str(transfer.options['store']).rstrip('/')}/{run_id(folder)}")
    await asyncio.to_thread(objects.check)

    async def remove() -> None:
        try:
            await asyncio.to_thread(objects.remove)
        except InfrastructureError as error:
            alert(f"{objects.url} still contains versions of this run: {error}")

    stack.push_async_callback(remove)
    return objects

"""Opens the interface of a run's driver for parts on other machines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from agentrl.cluster.file_service import FileService
from agentrl.cluster.run_service import HOST, RunService
from agentrl.experience import DriverStore
from agentrl.learner.learner_api import LearnerApi, LearnerSessions
from agentrl.protocols import Launcher
from agentrl.version import FolderRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """The interface, and the keys of learners; None if learners have the run folder."""

    service: RunService
    sessions: LearnerSessions | None = None


async def open_services(
    stack: AsyncExitStack, folder: Path, store: DriverStore, launcher: Launcher, judges: Mapping[str, Path]
) -> RunServices:
    """Opens the interface if parts do not share the run folder. Otherwise it is opened by the first part that needs it.

    `judges`: model folders of judge servers by name.

    Raises `InfrastructureError` if the driver's address is not available.
    """
    service = RunService(host=launcher.driver_host)
    if launcher.shared_folder:
        return RunServices(service=service)
    files, registry = FileService(folder, judges=judges), FolderRegistry(folder / "versions")
    service.add([*files.routes(), *LearnerApi(folder, store, registry).routes()])
    await stack.enter_async_context(service.serving())
    await launcher.use_driver(service.url, service.new_key(HOST))
    return RunServices(service=service, sessions=LearnerSessions(service, files))

"""A run's driver service in a thread of the test process, for mirrors and learners that are on "other hosts"."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.cluster.file_service import FileService
from agentrl.cluster.link import Link
from agentrl.cluster.mirror import Mirror
from agentrl.cluster.run_service import HOST, LEARNER, LOOPBACK, RunService
from agentrl.experience import DriverStore, SqliteStore
from agentrl.learner.learner_api import LearnerApi, LearnerSessions
from agentrl.version import FolderRegistry


@dataclass
class Driver:
    """A service that is open, and its event loop."""

    folder: Path
    service: RunService
    files: FileService
    sessions: LearnerSessions
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.service.url

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def start_learner(self) -> str:
        return str(self.call(self.sessions.start()))

    def link(self, part: str = HOST) -> Link:
        key = self.start_learner() if part == LEARNER else self.service.new_key(part)
        return Link(self.url, key)

    def mirror(self, folder: Path, part: str = HOST) -> Mirror:
        return Mirror(folder, self.link(part))


@contextlib.contextmanager
def driving(
    folder: Path, *, host: str = LOOPBACK, within: Callable[[], None] = lambda: None, keep_steps: int | None = None, **file_options: Any
) -> Iterator[Driver]:
    """Serves the run in `folder`. `within`: called first in the service's thread, for instance to enter a network namespace.

    `file_options`: arguments of the file service.
    """
    folder.mkdir(exist_ok=True)
    ready: list[Driver | BaseException] = []
    is_ready, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        store = await DriverStore.open(lambda: SqliteStore(folder / "experience.sqlite", keep_steps=keep_steps))
        files, registry = FileService(folder, **file_options), FolderRegistry(folder / "versions")
        service = RunService(host=host, routes=[*files.routes(), *LearnerApi(folder, store, registry).routes()])
        async with service.serving():
            ready.append(Driver(folder, service, files, LearnerSessions(service, files), asyncio.get_running_loop()))
            is_ready.set()
            await ended.wait()
        await store.close()

    def run() -> None:
        try:
            within()
            asyncio.run(serve())
        except BaseException as error:
            ready.append(error)
            is_ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_ready.wait(30)
    if isinstance(ready[0], BaseException):
        raise ready[0]
    try:
        yield ready[0]
    finally:
        ready[0].loop.call_soon_threadsafe(ended.set)
        thread.join(30)

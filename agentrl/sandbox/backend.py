"""The common part of the backends: it prepares each image once, opens sandboxes within a deadline, and closes all of them at the end."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.protocols.sandbox import OPEN_TIMEOUT_S
from agentrl.records import SandboxSpec
from agentrl.sandbox import egress, images, layout, server_code, waiting
from agentrl.sandbox.builds import BuildContext
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.lease import remove_folder, sandbox_folder, sandbox_name, write_run_label

MAX_OPENING = 8
FIRST_S = 60.0
"""Deadline for opening the sandbox that compiles the exec server. Callers' deadlines do not apply to it."""
ENDING_S = 30.0
"""How long `close` waits for the openings that it cancels. Each of them first closes its sandbox."""
_MAX_PREPARING = 4  # each image build occupies a thread of the driver, and closing sandboxes needs threads too

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyImage:
    """An image that a backend can start sandboxes from."""

    tree: str  # a tag in Docker, or the path of a folder
    server: Path  # exec server, as source or compiled
    fills_workdir: bool = False  # the image has files for the working directory
    from_packages: bool = False  # built from a distribution's packages only
    replacement: Path | None = None  # runs instead of the exec server

    @property
    def program(self) -> Path:
        """Path on the host of the program that runs as the exec server."""
        return self.replacement or self.server

    @property
    def program_path(self) -> str:
        """Path in the sandbox of the program that runs as the exec server."""
        return f"/agentrl/exec_server{self.program.suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """A sandbox that is being started."""

    name: str
    spec: SandboxSpec
    folder: Path  # runtime folder
    listener: egress.Listener | None  # None if the spec has no allow-list
    undo: contextlib.AsyncExitStack  # runs if the start fails


class ChannelBackend(waiting.ClosesOnce):
    """A `SandboxBackend` that reaches its sandboxes through a channel. `agentrl sandbox ls` shows `run_label`."""

    name: str

    def __init__(self, *, run_label: str, root: Path, progress: images.Progress = images.no_progress) -> None:
        self.run_label = run_label
        self._root = root
        self._progress = progress
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._open: dict[str, ChannelSandbox] = {}
        self._images: dict[str, ReadyImage] = {}
        self._preparing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._making = asyncio.Semaphore(_MAX_PREPARING)
        self._compiling = asyncio.Lock()  # images with the same content share a folder in the cache
        self._openings: dict[asyncio.Timeout, asyncio.Future[None]] = {}  # deadline of each opening -> done when the opening is over

    async def prepare(self, spec: SandboxSpec) -> None:
        """Builds or loads the image (a build takes about a minute and is cached) and compiles the exec server for it.

        Up to four images are prepared concurrently. A call for an image that is ready returns at once. Raises `UserError` if the image
        cannot be loaded or built, and `SandboxError` if the daemon fails or the exec server cannot be compiled in a sandbox.
        """
        async with self._preparing[spec.image]:
            if spec.image in self._images:
                return
            async with self._making:
                image = await asyncio.to_thread(self._load, spec.image)
                with waiting.propagate_cancellation():
                    tree = await self._ensure(image)
            async with self._compiling:
                from_source = ReadyImage(tree=tree, server=await asyncio.to_thread(server_code.ensure_source, image))
                code = await server_code.ensure_compiled(image, lambda: self._start_compiler(spec, from_source))
            dockerfile = isinstance(image.recipe, BuildContext)
            from_packages = isinstance(image.recipe, images.ImageRecipe) and not image.recipe.pull
            self._images[spec.image] = ReadyImage(tree=tree, server=code, fills_workdir=dockerfile, from_packages=from_packages)

    async def open(
        self,
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: bytes | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
        server: Path | None = None,
    ) -> ChannelSandbox:
        """Starts a sandbox. `server` replaces the exec server: the attack suite passes a compromised server.

        First calls `prepare`, whose time does not count, and raises its errors. Then raises `SandboxTimeout` if the sandbox does not open
        within `timeout_s`, `SandboxError` if the start fails or the backend is closed, `TaskError` if the image's files do not fit into the
        working directory, and `ValueError` if `files` or `snapshot` is invalid or does not fit. A failed start leaves nothing behind.
        """
        await self.prepare(spec)
        image = self._images[spec.image]
        images.record_use(image.server)
        async with self._within(timeout_s):
            sandbox = await self._start(spec, replace(image, replacement=server))
            try:
                if snapshot is not None:
                    await sandbox.restore(snapshot)
                if image.fills_workdir:
                    await layout.prepare_folders(sandbox, restored=snapshot is not None)
                if files:
                    await sandbox.write_all(files)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def _close(self) -> None:
        """Cancels openings in progress and closes every sandbox."""
        for deadline in self._openings:
            if not deadline.expired():
                deadline.reschedule(0.0)  # this time is past, so the opening is cancelled and cleans up
        if openings := list(self._openings.values()):
            await asyncio.wait(openings, timeout=ENDING_S)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open.values())))

    async def _start_compiler(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        async with self._within(FIRST_S):
            return await self._start(spec, image)

    @contextlib.asynccontextmanager
    async def _within(self, timeout_s: float) -> AsyncIterator[None]:
        """Limits the time for opening one sandbox, and the number of sandboxes that are opened at once. Raises `SandboxTimeout` if the time
        runs out, and `SandboxError` if the backend is closed or the block raises `OSError`."""
        if self._closing is not None:
            raise SandboxError("the backend is closed")
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                ended = self._openings[deadline] = asyncio.get_running_loop().create_future()
                try:
                    async with self._opening:
                        yield
                finally:
                    del self._openings[deadline]
                    ended.set_result(None)
        except SandboxError:
            raise
        except TimeoutError:
            if self._closing is not None:
                raise SandboxError("the backend is closed") from None
            raise SandboxTimeout(f"no {self.name} sandbox opened within {timeout_s:.1f} s{self._delay()}") from None
        except OSError as error:  # no descriptors, no memory for a process, no space in the runtime folder
            raise SandboxError(f"cannot open a {self.name} sandbox: {error}") from error

    @contextlib.asynccontextmanager
    async def _startup(self, spec: SandboxSpec) -> AsyncIterator[Startup]:
        """Creates the runtime folder and the egress listener of a new sandbox. If the block raises, runs `undo` and removes both."""
        name = sandbox_name()
        async with sandbox_folder(name) as folder, contextlib.AsyncExitStack() as undo:
            write_run_label(folder, self.name, self.run_label)
            listener = self._listener(name, spec, folder) if spec.network else None
            if listener is not None:
                undo.callback(listener.discard)
            yield Startup(name=name, spec=spec, folder=folder, listener=listener, undo=undo)
            undo.pop_all()

    async def _greeted(
        self,
        start: Startup,
        streams: Streams,
        relieve: Callable[[], Awaitable[bool]],
        end: Callable[[bool], Awaitable[None]],
        *,
        explain: Callable[[], str] = str,
    ) -> ChannelSandbox:
        """Returns the sandbox after its exec server has sent its greeting and, if there is an allow-list, the egress listener.

        A failure leaves nothing of the sandbox behind. `relieve` kills the programs (see `Channel`). `end` removes what the backend
        created; its argument says whether the exec server is known to have exited. `explain` returns additional information about a
        `SandboxError`, or "".
        """

        async def destroy(ended: bool) -> None:
            try:
                if start.listener is not None:
                    await start.listener.close()
                await end(ended)
            finally:
                await asyncio.to_thread(remove_folder, start.folder)
                self._open.pop(start.name, None)  # last: the backend's `close` waits for a sandbox that is being closed

        channel = Channel(*streams, name=start.name, relieve=relieve)
        sandbox = self._open[start.name] = ChannelSandbox(start.name, start.spec, channel, destroy)
        try:
            await channel.hello()
            if start.listener is not None:
                await start.listener.receive()
        except BaseException as error:
            explanation = explain()
            await sandbox.close()
            explanation = explanation or explain()  # a shared container's keeper may report the reason only now
            if explanation and isinstance(error, SandboxError):
                raise SandboxError(f"{error}; {explanation}") from None
            raise
        return sandbox

    def ways(self) -> dict[str, Any]:
        """Returns facts for the attack suite about how the driver connects to its sandboxes."""
        return {}

    def _load(self, image: str) -> images.Image:
        """Returns the image that a spec names. Blocking. Raises `UserError` if there is no valid image."""
        return images.load_image(self._root / image)

    def _listener(self, name: str, spec: SandboxSpec, folder: Path) -> egress.Listener:
        """Returns the host's end of the network access of a new sandbox with an allow-list."""
        return egress.EgressListener(name, spec, folder)

    def _delay(self) -> str:
        """Returns the end of a timeout message: a colon and what the opening waited for. Empty if that is unknown."""
        return ""

    @abc.abstractmethod
    async def _ensure(self, image: images.Image) -> str:
        """Builds or finds the image. Returns the value for `ReadyImage.tree`."""

    @abc.abstractmethod
    async def _start(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        """Starts one sandbox and waits for its exec server. The caller sets the deadline. A failed start leaves nothing behind."""

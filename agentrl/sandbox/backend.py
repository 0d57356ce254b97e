"""What the backends have in common: images made ready once, sandboxes opened within a deadline, all of them closed at the end."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.records import SandboxSpec
from agentrl.sandbox import cancellation, egress, images, layout, server_code
from agentrl.sandbox.build_context import BuildContext
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.channel_sandbox import ChannelSandbox

MAX_OPENING = 8
MAX_MAKING = 4
"""Images made at once. Each holds one of the driver's threads, of which closing sandboxes needs some too."""
FIRST_S = 60.0
"""Deadline of the first sandbox of an image, which nobody has asked for and no caller bounds."""
ENDING_S = 30.0
"""How long closing waits for openings that were under way; each ends its own sandbox first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyImage:
    """An image that a backend can start sandboxes from."""

    tree: str  # what the backend calls it: a tag, or the path of a folder
    server: Path  # exec server, as source or compiled
    fills_workdir: bool = False  # with a working directory that the image fills
    from_packages: bool = False  # made of a distribution's packages, and of nothing else
    replacement: Path | None = None  # run in the exec server's place

    @property
    def program(self) -> Path:
        """What runs as the exec server."""
        return self.replacement or self.server

    @property
    def program_path(self) -> str:
        """Its path in the sandbox."""
        return f"/agentrl/exec_server{self.program.suffix}"


class ChannelBackend(abc.ABC):
    """A `SandboxBackend` whose sandboxes are reached through a channel. `run_label` is shown by `agentrl sandbox ls`."""

    name: str

    def __init__(self, *, run_label: str, root: Path, progress: images.Progress = images.no_progress) -> None:
        self.run_label = run_label
        self._root = root
        self._progress = progress
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._open: dict[str, ChannelSandbox] = {}
        self._images: dict[str, ReadyImage] = {}
        self._preparing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._making = asyncio.Semaphore(MAX_MAKING)
        self._compiling = asyncio.Lock()  # images of one content share a place in the cache
        self._openings: dict[asyncio.Timeout, asyncio.Future[None]] = {}  # deadline of each under way -> done when it has ended
        self._closing: asyncio.Task[None] | None = None

    async def prepare(self, spec: SandboxSpec) -> None:
        """Makes the image ready (a minute the first time, then from the cache) and the exec server compiled for it.

        Different images are made at the same time, each of them once; one that is ready waits for no other.
        """
        if spec.image in self._images:
            return
        async with self._preparing[spec.image]:
            if spec.image in self._images:
                return
            async with self._making:
                image = await asyncio.to_thread(images.load_image, self._root / spec.image)
                with cancellation.propagate_cancellation():
                    tree = await self._ensure(image)
            async with self._compiling:
                from_source = ReadyImage(tree=tree, server=await asyncio.to_thread(server_code.as_source, image))
                code = await server_code.compiled(image, lambda: self._first(spec, from_source))
            begins = isinstance(image.recipe, BuildContext)
            packaged = isinstance(image.recipe, images.ImageRecipe) and not image.recipe.pull
            self._images[spec.image] = ReadyImage(tree=tree, server=code, fills_workdir=begins, from_packages=packaged)

    async def open(
        self,
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: bytes | None = None,
        timeout_s: float = 60.0,
        server: Path | None = None,
    ) -> ChannelSandbox:
        """Starts a sandbox. Raises `SandboxTimeout` or `SandboxError`, and `TaskError` where what its image holds has no
        room; then nothing of it is left.

        `server` is put in the exec server's place: that is how the attack suite plays one that an agent has taken over.
        """
        await self.prepare(spec)
        image = self._images[spec.image]
        images.record_use(image.server)
        async with self._under_way(timeout_s):
            sandbox = await self._start(spec, replace(image, replacement=server))
            try:
                if snapshot is not None:
                    await sandbox.restore(snapshot)
                elif image.fills_workdir:
                    await layout.fill_workdir(sandbox)
                if files:
                    await sandbox.write_all(files)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def close(self) -> None:
        """Ends the openings that are under way and closes every sandbox. Idempotent; carried through even when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {self.name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for deadline in self._openings:
            if not deadline.expired():
                deadline.reschedule(0.0)  # has passed: what waits there is woken, and undoes what it has made
        if ended := list(self._openings.values()):
            await asyncio.wait(ended, timeout=ENDING_S)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open.values())))

    async def _greeted(
        self, sandbox: ChannelSandbox, channel: Channel, listener: egress.EgressListener | None, *, explain: Callable[[], str] = str
    ) -> ChannelSandbox:
        """`sandbox`, once its exec server has greeted and its network, where it has one, is the host's; else nothing is left of it.

        `explain` is asked what else is known of a failure, before the sandbox's folder goes.
        """
        self._open[sandbox.id] = sandbox
        try:
            await channel.hello()
            if listener is not None:
                await listener.receive()
        except BaseException as error:
            said = explain()
            await sandbox.close()
            if said and isinstance(error, SandboxError):
                raise SandboxError(f"{error}; {said}") from None
            raise
        return sandbox

    async def _first(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        """The sandbox in which the exec server is compiled."""
        async with self._under_way(FIRST_S):
            return await self._start(spec, image)

    @contextlib.asynccontextmanager
    async def _under_way(self, timeout_s: float) -> AsyncIterator[None]:
        """Around one opening: a few at a time, within `timeout_s`, and only while the backend is not closed. Raises `SandboxError`."""
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
            raise SandboxTimeout(f"no {self.name} sandbox opened in {timeout_s:.1f} s") from None
        except OSError as error:  # no descriptors, no memory for a process, no room in the runtime folder
            raise SandboxError(f"no {self.name} sandbox can be opened: {error}") from error

    @abc.abstractmethod
    async def _ensure(self, image: images.Image) -> str:
        """Builds or finds the image; gives what `ReadyImage.tree` is to be."""

    @abc.abstractmethod
    async def _start(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        """Starts one sandbox and waits for its exec server's greeting. The caller bounds the wait; a failure leaves nothing."""

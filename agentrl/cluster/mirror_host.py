"""Hosts processes of a run on a machine that does not share the driver's disk. The processes use a mirror of the run folder."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from agentrl.cluster.link import Link, LinkLost
from agentrl.cluster.mirror import Mirror
from agentrl.cluster.process_host import HostedProcess, ProcessHost
from agentrl.cluster.relay import relaying
from agentrl.errors import InfrastructureError, LaunchError, UserError
from agentrl.protocols.cluster import PartCommand


class MirrorHost:
    """A `ProcessHost` whose processes use a mirror. It serves the mirror's chunks to other hosts until `close`."""

    def __init__(self, mirror: Mirror, *, root: Path | None, host: str) -> None:
        self.folder, self._mirror, self._host = mirror.folder, mirror, host
        self._processes = ProcessHost(mirror.folder, root=root, host=host)
        self._stack = AsyncExitStack()

    @classmethod
    async def open(cls, folder: Path, link: Link, *, root: Path | None, host: str) -> MirrorHost:
        """Returns a host that serves chunks to other mirrors. Raises `InfrastructureError` if the address is not available.

        Args:
            folder: the mirror; created if absent. Parts of a run that are on the same host may share it.
            link: the driver.
            host: address of this machine, for servers and for other mirrors.
        """
        opened = cls(Mirror(folder, link), root=root, host=host)
        await opened._stack.enter_async_context(relaying(opened._mirror, host=host))
        return opened

    async def start(self, command: PartCommand) -> HostedProcess:
        """Fetches the files that a part needs into the mirror, then starts the part. Raises `LaunchError` and `OSError`."""
        await self.fetch(*command.needs)
        process = self._processes.start(command)
        process.fetch = self.fetch  # type: ignore[method-assign]
        return process

    async def fetch(self, *paths: str) -> None:
        """Fetches these files and folders of the run into the mirror. Deletes versions that the driver has deleted.

        Raises `LaunchError`.
        """
        try:
            for path in paths:
                await asyncio.to_thread(self._mirror.fetch, path)
            if paths:
                keep = [path.removeprefix("versions/") for path in paths if path.startswith("versions/")]
                await asyncio.to_thread(self._mirror.drop_extra, "versions", keep=keep, unsent=False)
        except (LinkLost, LookupError, InfrastructureError, UserError) as error:
            fix = "check the disk of that host, and its network to the driver"
            raise LaunchError(f"{', '.join(paths)} cannot be fetched to {self._host}: {error}\n  fix: {fix}") from error

    async def close(self) -> None:
        """Kills the processes that are still running and stops serving other mirrors."""
        await self._processes.close()
        await self._stack.aclose()

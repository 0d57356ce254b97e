"""A launcher whose parts have their own disks: each kind of part has a mirror in its own folder on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from agentrl.cluster.link import Link
from agentrl.cluster.mirror_host import MirrorHost
from agentrl.cluster.process_host import HostedProcess
from agentrl.protocols.cluster import PartCommand

LOOPBACK = "127.0.0.1"


class OwnDisks:
    """A `Launcher`. The mirrors are `disks`/server, `disks`/worker, `disks`/learner, or `disks`/learner-0 and so on."""

    is_local, shared_folder, driver_host = False, False, LOOPBACK

    def __init__(self, folder: Path, *, root: Path | None = None, disks: Path | None = None, **local: object) -> None:
        """`local`: arguments of a `LocalLauncher` that have no effect here."""
        self._run, self._root, self._disks = folder, root, disks or Path(os.environ["AGENTRL_TEST_DISKS"])
        self._hosts: dict[str, MirrorHost] = {}
        self._driver = ("", "")

    def cores(self, name: str) -> int | None:
        return None

    async def use_driver(self, url: str, key: str) -> None:
        self._driver = url, key

    async def start(self, command: PartCommand) -> HostedProcess:
        kind = command.name if command.name.startswith("learner") else command.name.partition("-")[0]
        if kind not in self._hosts:
            self._hosts[kind] = await MirrorHost.open(self._disks / kind, Link(*self._driver), root=self._root, host=LOOPBACK)
        log = self._run / command.log  # the driver has the log, as with a remote host
        log.parent.mkdir(exist_ok=True)
        return await self._hosts[kind].start(replace(command, log=str(log.resolve())))

    async def close(self) -> None:
        for host in self._hosts.values():
            await host.close()

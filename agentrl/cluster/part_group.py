"""A handle for a part whose processes run on several hosts, such as the learner and its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from agentrl.protocols import PartHandle

_POLL_S = 0.2


class PartGroup:
    """A `PartHandle` for processes that work only together. The first process is on host 0, and only its reports are used.

    Process ids are unique only within a host, so a process on host n is listed as n * `HOST_IDS` plus its id.
    """

    HOST_IDS = 1 << 32

    def __init__(self, members: Sequence[PartHandle]) -> None:
        self._members = tuple(members)
        self._first = members[0]
        self._failure = 0  # exit code of the first member that failed, after which the others are killed

    @property
    def host(self) -> str:
        """The address of host 0."""
        return self._first.host

    @property
    def port(self) -> int:
        """The port of host 0."""
        return self._first.port

    @property
    def folder(self) -> str:
        """The path of the run folder on host 0."""
        return self._first.folder

    @property
    def node(self) -> str:
        """The name of host 0."""
        return self._first.node

    @property
    def pid(self) -> int:
        """The process id on host 0."""
        return self._first.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of the first member that failed; 0 if none failed; None while any member runs."""
        codes = [member.returncode for member in self._members]
        return None if None in codes else self._failure or next((code for code in codes if code), 0)

    @property
    def lost(self) -> str:
        """Why a member is gone without an exit code; empty if there is no such member."""
        return next((member.lost for member in self._members if member.lost), "")

    async def wait(self) -> int:
        """Waits until all members have exited and returns the exit code. If a member fails, kills the others, because they would wait for
        it. Raises the errors of `kill`."""
        while (code := self.returncode) is None:
            if failure := next((member.returncode for member in self._members if member.returncode), 0):
                self._failure = self._failure or failure
                await self.kill()
                continue
            ending = [asyncio.ensure_future(member.wait()) for member in self._members if member.returncode is None]
            try:
                await asyncio.wait(ending, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for process in ending:
                    process.cancel()
                await asyncio.gather(*ending, return_exceptions=True)
        return code

    def send_kill(self) -> None:
        """Kills all members, without waiting for them to exit."""
        for member in self._members:
            member.send_kill()

    async def kill(self) -> None:
        """Kills all members and returns when no process is left. Raises `LaunchError` if a member cannot be killed."""
        await asyncio.gather(*(member.kill() for member in self._members))

    async def terminate(self, *, grace_s: float) -> None:
        """Terminates all members. Raises `LaunchError` if a member cannot be killed."""
        await asyncio.gather(*(member.terminate(grace_s=grace_s) for member in self._members))

    async def signal_children(self, number: int) -> None:
        """Sends a signal to the children of each member."""
        await asyncio.gather(*(member.signal_children(number) for member in self._members))

    def processes(self) -> Mapping[int, str]:
        """Returns the processes of all members with their states."""
        return {host * self.HOST_IDS + pid: state for host, one in enumerate(self._members) for pid, state in one.processes().items()}

    def read_progress(self) -> bytes:
        """Returns the progress that the process on host 0 has reported since the last call."""
        return self._first.read_progress()

    @property
    def clock_offset_s(self) -> float:
        """The clock offset of host 0, in seconds."""
        return self._first.clock_offset_s

    def reasons(self) -> bytes:
        """Returns the exit reasons of all members."""
        return b"".join(member.reasons() for member in self._members)

    async def fetch(self, *paths: str) -> None:
        """Fetches files on every host."""
        await asyncio.gather(*(member.fetch(*paths) for member in self._members))

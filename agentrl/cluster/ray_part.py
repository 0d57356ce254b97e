"""The driver's side of the parts on a Ray cluster: the handles, and the thread that polls their hosts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.cluster.ray_host import LEASE_S, PartState
from agentrl.errors import LaunchError

SILENT_S = LEASE_S + 5.0
"""Seconds without a response after which a part counts as lost. By then its host has killed it."""
REFUSED_S = 5.0
"""If all calls fail for this number of seconds, a part counts as lost, because its host has exited or the machine is down."""
_POLL_S = 0.5
_ANSWER_S = 5.0
_END_S = 70.0  # deadline for a host to kill a part; the host gives up after a minute
FETCH_S = 1860.0
"""Deadline, in seconds, for a host to fetch files. It is longer than the deadline of the host's mirror."""
_PROGRESS_BYTES = 1 << 20


class RayPart:
    """A part on a node: a `PartHandle`. `PartPoller` updates the part's state from a separate thread."""

    def __init__(
        self,
        ray: Any,
        actor: Any,
        start: str,
        name: str,
        state: PartState,
        *,
        log: Path | None = None,
        driver: tuple[str, str] | None = None,
    ) -> None:
        """`log` and `driver`: for a part that uses a mirror, the file for its output, and the driver's address and key."""
        self.name, self.start, self._log, self._driver = name, start, log, driver
        self.node, self.host, self.port, self.pid = state.node, state.host, state.port, state.pid
        self.folder, self.node_id = state.folder, state.node_id
        self.lost = ""
        self.returncode: int | None = None
        self.answered_at = time.monotonic()  # time of the last response from the host
        self.refused_at: float | None = None  # time of the first failed call since then
        self.clock_offset_s = 0.0
        self._ray, self._actor = ray, actor
        self._tree: Mapping[int, str] = {}
        self._progress, self._reasons = b"", b""
        self._lock = threading.Lock()
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._watching = asyncio.create_task(self._watch_host(state.watch_port), name=f"host of {name}")
        self.answered(state)

    async def wait(self) -> int:
        """Waits for the part to exit and returns its exit code."""
        await self._ended.wait()
        assert self.returncode is not None, "an ended part has an exit code"
        return self.returncode

    async def _watch_host(self, port: int) -> None:
        """Detects the exit of the host by the end of a connection, because Ray reports the exit only much later. Some networks block such a
        connection."""
        with contextlib.suppress(TimeoutError, OSError):
            while self.returncode is None:
                async with asyncio.timeout(_ANSWER_S):
                    reader, writer = await asyncio.open_connection(self.host, port)
                try:
                    with contextlib.suppress(ConnectionError):
                        await reader.read(1)
                    await asyncio.sleep(_POLL_S)
                    async with asyncio.timeout(_ANSWER_S):
                        _, second = await asyncio.open_connection(self.host, port)
                    second.close()
                except ConnectionRefusedError:
                    self.lose(f"its host on node {self.node} ended")
                finally:
                    writer.close()

    def send_kill(self) -> None:
        """Kills all processes of the part, without waiting for them to exit."""
        if self.returncode is None:
            with contextlib.suppress(OSError):  # the connection to the cluster was lost; the poller detects that
                self._actor.end.remote(self.start, 0.0)

    async def kill(self) -> None:
        """Kills all processes of the part and returns when none is left. A lost part was or will be killed by its host, or exited with the
        host.

        Raises `LaunchError` if a process does not exit.
        """
        await self._end(0.0)

    async def terminate(self, *, grace_s: float) -> None:
        """Sends SIGTERM to the first process, waits up to `grace_s` seconds for it to exit, then kills the part as `kill` does."""
        await self._end(grace_s)

    async def _end(self, grace_s: float) -> None:
        """Stops the part. Returns when the part has stopped or is lost."""
        if self.lost:
            return
        lost = asyncio.create_task(self._ended.wait())
        try:
            ending = asyncio.wrap_future(self._actor.end.remote(self.start, grace_s).future())
            ending.add_done_callback(lambda done: done.cancelled() or done.exception())  # no code waits for it once the part is lost
            async with asyncio.timeout(grace_s + _END_S):
                await asyncio.wait([ending, lost] if self.returncode is None else [ending], return_when=asyncio.FIRST_COMPLETED)
                if not self.lost:
                    state = await ending
                    if isinstance(state, str):
                        raise LaunchError(f"{state}, on {self.node}")
                    self.answered(state)
        except (OSError, self._ray.exceptions.RayError) as error:  # also at the deadline, or if the connection to the cluster was lost
            self.lose(f"node {self.node} does not answer: {type(error).__name__}")
        finally:
            lost.cancel()

    async def signal_children(self, number: int) -> None:
        """Sends a signal to the children of the first process."""
        if self.returncode is None:
            with contextlib.suppress(OSError, self._ray.exceptions.RayError):  # the poller detects the loss
                async with asyncio.timeout(_ANSWER_S):
                    await asyncio.wrap_future(self._actor.signal_children.remote(self.start, number).future())

    def processes(self) -> Mapping[int, str]:
        """Returns process id -> state for the processes of the part, as of the last poll."""
        return self._tree if self.returncode is None else {}

    def read_progress(self) -> bytes:
        """Returns the bytes that the part has written to `PROGRESS` since the last call."""
        with self._lock:
            data, self._progress = self._progress, b""
        return data

    def reasons(self) -> bytes:
        """Returns the bytes that the part has appended to `REASONS`; empty until the part has exited."""
        return self._reasons

    async def fetch(self, *paths: str) -> None:
        """Fetches these files of the run to the node, unless the node has the run folder. Raises `LaunchError` if a file cannot be
        fetched."""
        if self._driver is None:  # the node has the run folder
            return
        try:
            async with asyncio.timeout(FETCH_S):
                failure = await asyncio.wrap_future(self._actor.fetch.remote(self._driver, paths).future())
        except (OSError, self._ray.exceptions.RayError) as error:
            failure = f"node {self.node} does not answer: {type(error).__name__}"
        if failure:
            raise LaunchError(failure)

    def poll(self) -> Any:
        """Requests the state from the host. Returns Ray's reference to the call."""
        return self._actor.poll.remote(self.start)

    def answered(self, state: PartState | None) -> None:
        """Records a response from the host. None means that the host was restarted, so the part is gone."""
        self.answered_at, self.refused_at = time.monotonic(), None
        if state is None:
            self.lose(f"its host on node {self.node} ended")
            return
        if self._log is not None and state.log:
            with contextlib.suppress(OSError), self._log.open("ab") as log:
                log.write(state.log)
        self.clock_offset_s, self._tree = self.answered_at - state.clock, state.processes
        with self._lock:
            self._progress = (self._progress + state.progress)[-_PROGRESS_BYTES:]
        self._reasons = state.reasons or self._reasons
        if state.returncode is not None:
            self._finish(state.returncode)

    def refused(self) -> None:
        """Records that a call failed."""
        self.refused_at = self.refused_at or time.monotonic()

    def check_silence(self, *, node_is_dead: bool) -> None:
        """Marks the part as lost if its node is dead, or if its host has been silent for too long."""
        now = time.monotonic()
        if node_is_dead:
            self.lose(f"node {self.node} died")
        elif self.refused_at is not None and now - self.refused_at > REFUSED_S:
            self.lose(f"its host on node {self.node} died")
        elif now - self.answered_at > SILENT_S:
            self.lose(f"node {self.node} has not answered for {SILENT_S:g} s")

    def lose(self, reason: str) -> None:
        """Marks the part as lost, with the exit code of SIGKILL, unless it has exited."""
        if self.returncode is None:
            self.lost = reason
            self._finish(-signal.SIGKILL)

    def _finish(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = int(code)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)
                self._loop.call_soon_threadsafe(self._watching.cancel)


class PartPoller:
    """A thread that polls the hosts of all parts, so that leases are renewed while the driver's event loop is busy."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._parts: set[RayPart] = set()
        self._waiting: dict[Any, RayPart] = {}  # reference of a poll -> its part
        self._changed, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, part: RayPart) -> None:
        """Polls a part until it exits or is lost."""
        with self._changed:
            self._parts.add(part)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="agentrl cluster")
            self._thread.start()

    def close(self) -> None:
        """Stops the thread. Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_ANSWER_S)

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            with self._changed:
                self._parts = {part for part in self._parts if part.returncode is None}
                parts = list(self._parts)
            waiting = set(self._waiting.values())
            for part in parts:
                if part not in waiting:
                    try:
                        self._waiting[part.poll()] = part
                    except Exception:  # the connection to the cluster was lost; Ray raises arbitrary errors
                        part.refused()
            self._receive()
            dead = self._dead_nodes(parts)
            for part in parts:
                part.check_silence(node_is_dead=part.node_id in dead)

    def _receive(self) -> None:
        """Waits briefly for responses, and passes those that have arrived to their parts."""
        if not self._waiting:
            return
        references = list(self._waiting)
        try:
            arrived, _ = self._ray.wait(references, num_returns=len(references), timeout=_POLL_S)
        except Exception:  # as above
            arrived = references
        for reference in arrived:
            part = self._waiting.pop(reference)
            try:
                part.answered(self._ray.get(reference))
            except Exception:  # as above
                part.refused()
        for reference, part in list(self._waiting.items()):
            if part.returncode is not None:
                del self._waiting[reference]

    def _dead_nodes(self, parts: list[RayPart]) -> set[str]:
        """Returns the ids of the nodes that Ray reports as dead. Requests them only while a host does not respond."""
        now = time.monotonic()
        if all(part.refused_at is None and now - part.answered_at < _ANSWER_S for part in parts):
            return set()
        try:
            return {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]}
        except Exception:  # as above
            return set()

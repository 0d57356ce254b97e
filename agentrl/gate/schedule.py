"""Schedules the gate's evaluations: between two swaps on the policy's servers, or concurrently on the gate's own server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.recipe import Recipe
from agentrl.errors import StoreError, SwapError
from agentrl.gate.gate import Gate
from agentrl.protocols import Launcher, VersionRegistry
from agentrl.records import PolicyVersion
from agentrl.serving.supervisor import SupervisedServer

if TYPE_CHECKING:
    from agentrl.session.opening import Progress

log = logging.getLogger(__name__)

_POLL_S = 0.05


class VersionServer:
    """A server that serves only requested versions of the policy, while the policy's servers continue with newer versions.

    The gate uses such a server if `gate.server=own`. A league also uses such a server. Call `start` before the first `serve`.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        registry: VersionRegistry,
        *,
        name: str = "gate",
        launcher: Launcher | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """Creates the server without starting it. `name`, `launcher` and `alert` are passed to `SupervisedServer`."""
        self._run_dir, self._registry = run_dir, registry
        self._version: PolicyVersion | None = None
        self.policy = SupervisedServer(recipe, run_dir, registry, name=name, newest=self._newest, launcher=launcher, alert=alert)

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Starts the server with the weights of a version. Raises the same errors as `SupervisedServer.start`."""
        self._version = version
        await self.policy.start(version, await_probe=await_probe)

    async def serve(self, version: PolicyVersion) -> None:
        """Loads a version and waits until it is served.

        Raises `SwapError` if the server rejects the version, and `ServingError` if the server does not recover.
        """
        self._version = version
        if (self.policy.version, self.policy.sha256) != (version.number, version.sha256):
            await self.policy.load_with_retries(version)

    async def _newest(self) -> PolicyVersion | None:
        """Returns the version that a restarted server loads: the last requested version, or version 0 if those weights were deleted."""
        version = self._version
        if version is None or version.number == 0:
            return version
        known = await asyncio.to_thread(self._registry.get, version.number)
        exists = known is not None and known.sha256 == version.sha256 and (self._run_dir / version.folder / "probe.json").exists()
        return version if exists else await asyncio.to_thread(self._registry.get, 0)


@asynccontextmanager
async def schedule_gate(gate: Gate | None, progress: Progress) -> AsyncIterator[GateSchedule]:
    """Yields the gate's schedule for a run.

    If an evaluation on the gate's own server fails, the body of the `async with` statement is cancelled, and the error is raised in an
    `ExceptionGroup`. On exit, waits for the running evaluation, or cancels it if the run is interrupted. The resumed run repeats a
    cancelled evaluation.
    """
    if gate is None or gate.server is None:
        yield GateSchedule(gate, progress, None)
        return
    async with asyncio.TaskGroup() as evaluations:
        schedule = GateSchedule(gate, progress, evaluations)
        yield schedule
        await schedule.finish()


class GateSchedule:
    """Runs one evaluation at a time. Call `evaluate_due` after every change of the served version.

    If the policy's servers are used, `evaluate_due` returns after the evaluation. If the gate has its own server, `evaluate_due` returns
    immediately, unless the previous version is still being evaluated. If there is no gate, `evaluate_due` does nothing.
    """

    def __init__(self, gate: Gate | None, progress: Progress, evaluations: asyncio.TaskGroup | None) -> None:
        self._gate, self._progress, self._evaluations = gate, progress, evaluations
        self._running: asyncio.Task[None] | None = None
        self._started: set[tuple[int, str]] = set()  # number and sha256 of versions whose evaluation has started

    async def evaluate_due(self) -> None:
        """Evaluates the due versions on the policy's servers, or starts their evaluation on the gate's own server."""
        gate = self._gate
        if gate is None:
            return
        if gate.server is None or self._evaluations is None:
            await self._evaluate_serving(gate)
            return
        # A retracted version may be published again with the same weights, so versions that are not served yet are removed from the set.
        self._started = {key for key in self._started if key[0] < gate.served.version}
        while (new := await self._next_due(gate)) is not None:
            await self._wait_idle()
            if self._progress.interrupted:
                return
            self._started.add((new.number, new.sha256))
            await asyncio.to_thread(gate.registry.hold, new.number)
            self._running = self._evaluations.create_task(self._evaluate(gate, gate.server, new))

    async def _next_due(self, gate: Gate) -> PolicyVersion | None:
        """Returns the oldest due version whose evaluation has not started; None if there is none."""
        due = await asyncio.to_thread(gate.due_versions)
        return next((version for version in due if (version.number, version.sha256) not in self._started), None)

    async def finish(self) -> None:
        """Waits for the running evaluation, or cancels it if the run is interrupted."""
        if self._gate is not None and self._running is not None and not self._running.done():
            self._gate.tracker.stage("gate", "the last evaluation, on the gate's own server")
            await self._wait_idle()
            self._running.cancel()

    async def _wait_idle(self) -> None:
        """Waits until no evaluation is running or the run is interrupted."""
        while self._running is not None and not self._running.done() and not self._progress.interrupted:
            await asyncio.wait([self._running], timeout=_POLL_S)

    async def _evaluate_serving(self, gate: Gate) -> None:
        version = await asyncio.to_thread(gate.due, gate.served.version)
        if version is None:
            return
        is_new = await asyncio.to_thread(gate.verdict_for, version) is None
        await gate.decide(version)
        if is_new:
            gate.tracker.stage("train", self._progress.plan)
            self._progress.timeline.restart()

    async def _evaluate(self, gate: Gate, server: VersionServer, version: PolicyVersion) -> None:
        if await asyncio.to_thread(gate.verdict_for, version) is None:
            if not await _is_wanted(gate, version):
                return
            try:
                await asyncio.to_thread(gate.registry.verify, version)
                await server.serve(version)
            except StoreError as error:
                if await _is_wanted(gate, version):
                    gate.tracker.alert(f"version {version.number} is not evaluated: {error}")
                return
            except SwapError:
                if await _is_wanted(gate, version):
                    raise
                return
        current = await asyncio.to_thread(gate.registry.get, version.number)
        if current is not None and current.sha256 == version.sha256:
            await gate.decide(current)


async def _is_wanted(gate: Gate, version: PolicyVersion) -> bool:
    """Whether the version must still be evaluated.

    If the version was retracted, the new version with the same number is evaluated when it serves.
    """
    current = await asyncio.to_thread(gate.registry.get, version.number)
    return current is not None and current.sha256 == version.sha256 and not await asyncio.to_thread(gate.is_rejected, current)

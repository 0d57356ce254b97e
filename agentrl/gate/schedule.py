"""When the gate judges: between two swaps on the policy's servers, or beside the run on the gate's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.errors import StoreError, SwapError
from agentrl.gate.judgement import due_serving_version, due_versions, gate_version, is_refused, verdict_for
from agentrl.gate.server import GateServer
from agentrl.records import PolicyVersion
from agentrl.session.opening import Run

_POLL_S = 0.05


@asynccontextmanager
async def schedule_gate(run: Run) -> AsyncIterator[GateSchedule]:
    """The judgements of a run. One that fails ends the block.

    Leaving it waits for the judgement in hand, or gives that up where the run is interrupted: the run that goes on makes it again.
    """
    if run.gate_server is None:
        yield GateSchedule(run, None)
        return
    async with asyncio.TaskGroup() as beside:
        made = GateSchedule(run, beside)
        yield made
        await made.finish()


class GateSchedule:
    """One judgement at a time: `look` after every change of the served version.

    Without a server of the gate's own `look` returns when the served version is judged. With one it returns at once, unless the version
    before it is still being judged.
    """

    def __init__(self, run: Run, beside: asyncio.TaskGroup | None) -> None:
        self._run, self._beside = run, beside
        self._judgement: asyncio.Task[None] | None = None
        self._seen: set[tuple[int, str]] = set()  # number and sha256 of versions that were judged, or are being judged

    async def evaluate_due(self) -> None:
        """Judges what is due, or begins to."""
        run = self._run
        if run.recipe.gate is None:
            return
        if run.gate_server is None or self._beside is None:
            await self._between_swaps()
            return
        # A version that was retracted and made again has, from the same groups, the same weights: whoever serves anew is looked at anew.
        self._seen = {one for one in self._seen if one[0] < run.served.version}
        while new := [version for version in due_versions(run) if (version.number, version.sha256) not in self._seen]:
            await self._at_rest()
            if run.interrupted:
                return
            self._seen.add((new[0].number, new[0].sha256))
            run.registry.hold(new[0].number)
            self._judgement = self._beside.create_task(self._judge(run.gate_server, new[0]))

    async def finish(self) -> None:
        """Waits for the judgement in hand, and no longer than the run is interrupted."""
        if self._judgement is not None and not self._judgement.done():
            self._run.tracker.stage("gate", "the last judgement, on the gate's own server")
            await self._at_rest()
            self._judgement.cancel()

    async def _at_rest(self) -> None:
        """Returns once nothing is being judged, or the run is interrupted."""
        while self._judgement is not None and not self._judgement.done() and not self._run.interrupted:
            await asyncio.wait([self._judgement], timeout=_POLL_S)

    async def _between_swaps(self) -> None:
        run, version = self._run, due_serving_version(self._run)
        if version is None:
            return
        judged_before = verdict_for(run, version) is not None
        await gate_version(run, version)
        if not judged_before:
            run.tracker.stage("train", f"{run.stop_at} steps")
            run.last_step_at = time.monotonic()

    async def _judge(self, server: GateServer, version: PolicyVersion) -> None:
        run = self._run
        if verdict_for(run, version) is None:
            if not self._wanted(version):
                return
            try:
                await asyncio.to_thread(run.registry.verify, version)
                await server.serve(version)
            except StoreError as error:
                if self._wanted(version):
                    run.tracker.alert(f"version {version.number} is not judged: {error}")
                return
            except SwapError:
                if self._wanted(version):
                    raise
                return
        current = run.registry.get(version.number)
        if current is not None and current.sha256 == version.sha256:
            await gate_version(run, current)

    def _wanted(self, version: PolicyVersion) -> bool:
        """Whether it is to be judged: neither refused nor retracted. Who has a retracted one's number next is judged when it serves."""
        current = self._run.registry.get(version.number)
        return current is not None and current.sha256 == version.sha256 and not is_refused(self._run, current)

"""The rollout workers of a run: the interface for workers, and the worker processes that the driver starts and replaces."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from agentrl.base.error_text import cause_in_log
from agentrl.base.files import tail_bytes
from agentrl.base.liveness import RestartAlert, Restarts
from agentrl.cluster.link import KEY_VARIABLE
from agentrl.cluster.run_service import WORKER, RunService
from agentrl.config.recipe import Recipe
from agentrl.errors import InfrastructureError, LaunchError
from agentrl.experience import DriverStore, FolderCheckpoints
from agentrl.judge.servers import registered_servers
from agentrl.memory.run_memory import RunMemory
from agentrl.observe.run_events import Record
from agentrl.protocols import Launcher, PartCommand, PartHandle, PolicyServer
from agentrl.protocols.cluster import PARENT, PYTHON, ROOT, RUN
from agentrl.records import Group, Task
from agentrl.rollout import AttemptListener
from agentrl.rollout.leases import GroupLeases
from agentrl.run.group_stream import GroupStream
from agentrl.run.worker import UNUSABLE, WorkerSpec, worker_name
from agentrl.run.worker_api import WorkerApi
from agentrl.session.pace import history_of, restore_pace

_WATCH_S = 0.25
_RESTARTS = 5  # maximum number of restarts of one process in a row
_RESTARTS_UNUSABLE = 1  # maximum number of restarts if the host lacks something that a different host may have
_SOUND_S = 120.0  # duration of work after which earlier failures are no longer counted
_BACKOFF_S = 5.0
_START_S = 180.0
_TAIL_BYTES = 1 << 16
_END_S = 10.0  # time for a worker to exit before it is killed


class WorkerPool:
    """Samples groups in other processes (a `GroupSampler`).

    The driver starts `rollout.workers` processes. Additional workers may join.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        root: Path,
        store: DriverStore,
        served: PolicyServer,
        memory: RunMemory | None,
        checkpoints: FolderCheckpoints,
        launcher: Launcher,
        service: RunService,
        on_attempt: AttemptListener,
        alert: Callable[[str], None],
        record_event: Record,
    ) -> None:
        rollout = recipe.rollout
        self.group_size = rollout.group.size
        self.restarts = 0
        self._count, self._folder, self._alert, self._launcher = rollout.workers, folder, alert, launcher
        self._stream: GroupStream | None = None  # None means that workers send their groups over HTTP
        if recipe.store.ref == "redis":
            self._stream = GroupStream(recipe, folder, store, launcher=launcher, alert=alert)
        share = math.ceil(rollout.concurrency / rollout.workers)
        self._leases = GroupLeases(group_size=rollout.group.size, concurrency=share, on_attempt=on_attempt)
        spec = WorkerSpec(
            recipe=recipe.model_dump(mode="json"),
            folder=str(folder.resolve()),
            root=str(root.resolve()),
            concurrency=share,
            max_open=math.ceil(recipe.sandbox.max_open * share / rollout.concurrency),  # the same number per episode as without workers
            judges={name: one.weights for name, one in registered_servers().items()},
        )
        self._service = service
        self._api = WorkerApi(
            folder=folder,
            service=service,
            spec=asdict(spec),
            leases=self._leases,
            served=served,
            memory=memory,
            checkpoints=checkpoints,
            pace=lambda: history_of(restore_pace(recipe, folder)),
            on_attempt=on_attempt,
            alert=alert,
            record_event=record_event,
        )
        self._processes: dict[int, PartHandle] = {}  # number -> process

    async def run_group(self, index: int, task: Task, *, oldest_version: int = 0) -> Group:
        """Returns a group that a worker samples. See `GroupLeases`."""
        return await self._leases.run_group(index, task, oldest_version=oldest_version)

    def figures(self) -> dict[str, float]:
        """Returns step metrics: the current numbers of active workers and of groups that wait for a worker, and, since the start, the
        numbers of restarts and of groups whose worker was lost."""
        leases = self._leases
        return {
            "workers": leases.workers,
            "groups_queued": leases.waiting,
            "worker_restarts": self.restarts,
            "worker_losses": leases.losses,
        }

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers that the driver started."""
        return tuple(process.pid for process in self._processes.values())

    async def watch(self) -> None:
        """Serves workers, and restarts the worker processes of the driver when they exit, until the call is cancelled.

        Raises `InfrastructureError` if a worker fails too often in a row.
        """
        async with AsyncExitStack() as stack:
            if self._stream is not None:
                leases = self._leases
                receiving = self._stream.serving(lambda one: leases.arrive(one.lease, one.group), leases.forget)
                self._api.spec["redis"] = await stack.enter_async_context(receiving)
            await stack.enter_async_context(self._api.serving())
            try:
                async with asyncio.TaskGroup() as watching:
                    for number in range(self._count):
                        watching.create_task(self._keep(number))
                    watching.create_task(self._watch_silence())
            finally:
                await asyncio.gather(*(process.terminate(grace_s=_END_S) for process in self._processes.values()))

    async def _keep(self, number: int) -> None:
        """Restarts one process until it fails too often in a row."""
        restarts = Restarts(sound_s=_SOUND_S)
        while True:
            most = _RESTARTS
            try:
                code, cause = await self._run(number, restarts)
                most = _RESTARTS_UNUSABLE if code == UNUSABLE else most
            except LaunchError as error:
                cause = str(error)
            self.restarts += 1
            if (failures := restarts.failed()) > most:
                raise InfrastructureError(f"rollout worker {number} failed {failures} times in a row: {cause}")
            why = f"rollout worker {number} is replaced: {cause}; its groups continue in another worker"
            self._alert(RestartAlert("rollout worker", why))
            await asyncio.sleep(min(_BACKOFF_S, 0.1 * 4 ** (failures - 1)) if failures > 1 else 0.0)

    async def _run(self, number: int, restarts: Restarts) -> tuple[int, str]:
        """Runs one process until it exits. Returns its exit code and the cause. Raises `LaunchError` if the process does not start."""
        process = self._processes[number] = await self._start(number)
        name = worker_name(process.pid, node=process.node)
        self._leases.expect(name, within_s=_START_S)
        restarts.started()
        code = await process.wait()
        restarts.progress()
        await self._leases.lose(name)
        await process.kill()  # also kills the processes that the worker started
        return code, process.lost or self._cause(number, code)

    async def _start(self, number: int) -> PartHandle:
        command, environment = [PYTHON, "-m", "agentrl.run.worker", RUN, PARENT], {}
        if not self._launcher.shared_folder:
            command += ["--driver", self._service.url, "--root", ROOT]
            environment[KEY_VARIABLE] = self._service.new_key(WORKER)
        log = f"logs/{self._log(number).name}"
        return await self._launcher.start(
            PartCommand(name=f"worker-{number}", argv=tuple(command), environment=environment, log=log, secrets=True)
        )

    async def _watch_silence(self) -> None:
        """Requeues the groups of workers that no longer send heartbeats. Such workers are killed and replaced if the driver started
        them."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for worker in await self._leases.lose_silent():
                self._alert(f"rollout worker {worker} is silent; its groups continue in another worker")
                for process in self._processes.values():
                    if worker_name(process.pid, node=process.node) == worker:
                        process.send_kill()

    def _cause(self, number: int, code: int) -> str:
        if code < 0:
            return f"it was killed by signal {-code}, {signal.Signals(-code).name}"
        cause, _ = cause_in_log(tail_bytes(self._log(number), most=_TAIL_BYTES))
        return f"it ended with exit code {code}: {cause or 'it gave no reason'} (see logs/{self._log(number).name})"

    def _log(self, number: int) -> Path:
        return self._folder / "logs" / f"worker-{number}.log"

"""A rollout worker: a process that samples and scores groups for the driver of a run (`agentrl.run.worker_api`).

    python -m agentrl.run.worker RUN_DIR [PARENT_PID] [--driver URL --root PROJECT]
    agentrl worker RUN_DIR
    agentrl worker URL

If the worker is started with the driver's address, its host needs the project, but no run folder. The worker opens the run's sandboxes,
agent, tools and verifiers, leases groups, and samples through the driver. It holds no state that the run needs: if it is killed, another
worker continues its groups from their saved episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.agent.run_tools import candidate_tasks, declared_tools, pin_tools, with_sub_agent_tools
from agentrl.base import user_code
from agentrl.base.activity import ACTIVITY
from agentrl.base.error_text import main_error
from agentrl.base.loop_lag import DRIVER_LAG
from agentrl.base.processes import die_with_parent, raise_file_limit, rare_collections
from agentrl.base.secrets import RedactingFormatter
from agentrl.cluster.link import take_key
from agentrl.config.recipe import Recipe, build
from agentrl.config.tools import MemoryConfig
from agentrl.environment import close_environments
from agentrl.errors import InfrastructureError, RequestRefused, SandboxUnavailable, ServerDied, ServingError, UserError
from agentrl.judge.servers import registered_servers
from agentrl.memory import StoreView
from agentrl.memory.episode import SearchableNotes
from agentrl.memory.run_memory import placeholder_memory
from agentrl.observe.event_log import MAX_WAITING
from agentrl.observe.events import Event, EventsDropped, encode
from agentrl.observe.run_events import EpisodeEvents
from agentrl.plugins.references import add_project_root
from agentrl.protocols import CacheUse
from agentrl.protocols.serving import MAX_CACHE_USE
from agentrl.records import Completion, Failure, Group, SamplingParams, Split, Task, codec
from agentrl.rollout import Admission, GroupRunner, Pace, excluded_group, failure_from_error
from agentrl.run.group_stream import Outbox, open_transport
from agentrl.run.worker_access import WorkerAccess
from agentrl.run.worker_api import LEASE_WAIT_S, MAX_EVENTS, MAX_GROUP_BYTES, MAX_STREAMED
from agentrl.sandbox import open_sandboxes
from agentrl.serving.transport import HttpTransport
from agentrl.session.builders import build_episode_runner, build_group_runner
from agentrl.session.judge_servers import declare_judge_servers, declare_judges
from agentrl.session.preflight import open_chat, open_group_judge, open_tasks

log = logging.getLogger(__name__)

RENEW_S = 1.0
"""Seconds between two heartbeats."""
_PATIENCE_S = 30.0  # time without a response from the driver after which the worker exits
_REQUEST_S = 60.0  # deadline of a request for which the driver need not wait
_MARGIN_S = 45.0  # added to the deadline of a request to the policy
_SENT_S = 600.0  # time within which the driver must read a group from the stream; otherwise, the group is sampled again
_CONNECTIONS = 8192
_STREAMED_BYTES = 1 << 20  # maximum size of the events in one renewal
_KINDS = {error.__name__: error for error in (ServingError, ServerDied, RequestRefused)}  # the class determines the blame


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The JSON data that a worker needs to open the parts of a run."""

    recipe: dict[str, Any]
    folder: str  # run folder on the driver's machine
    root: str  # project folder with the recipe's plug-ins on the driver's machine
    concurrency: int  # maximum number of episodes at once in one worker
    max_open: int  # maximum number of sandboxes at once in one worker
    judges: dict[str, str] = field(default_factory=dict)  # judge server -> sha256 of its weights
    token_s: float = 0.0  # see `PolicyServer.token_s`
    pace: dict[str, Any] | None = None  # see `Pace.to_data`; None means no history
    redis: dict[str, Any] = field(default_factory=dict, repr=False)  # see `open_transport`; empty if groups are sent over HTTP


class DriverConnection:
    """Sends requests to the driver. Raises `ServingError` if the driver fails or does not respond, and `UserError` if the driver rejects a
    request."""

    def __init__(self, url: str, key: str, *, worker: str) -> None:
        self.worker = worker
        self._transport = HttpTransport(url, key=key, max_connections=_CONNECTIONS, what="the driver")

    async def call(self, path: str, data: Any = None, *, content: bytes | None = None, timeout_s: float = _REQUEST_S) -> bytes:
        """Sends a POST request, or a GET request if `data` and `content` are None. Returns the content of the response."""
        method = "GET" if data is None and content is None else "POST"
        body = content if content is not None else b"" if data is None else json.dumps({"worker": self.worker, **data}).encode()
        try:
            async with asyncio.timeout(timeout_s):
                status, answer = await self._transport.request(method, path, body)
        except TimeoutError:
            raise ServingError(f"the driver did not respond to {path} within {timeout_s:g} s") from None
        if status in (400, 401, 403, 404, 413):
            fix = "use the key of this run's driver" if status == 401 else "use the same agentrl version"
            raise UserError(f"the driver rejected {path}: {answer[:500].decode(errors='replace')}", fix=fix)
        if status not in (200, 204):
            raise _fault(status, answer)
        return answer

    def close(self) -> None:
        """Aborts all requests."""
        self._transport.close()


def _fault(status: int, answer: bytes) -> ServingError:
    """Returns the error for a failed request: the error of the policy's server if the driver forwards one, otherwise a `ServingError`."""
    try:
        problem = json.loads(answer)
        return _KINDS.get(problem["kind"], ServingError)(str(problem["error"]))
    except (ValueError, LookupError, TypeError):
        return ServingError(f"the driver responded with status {status}: {answer[:500].decode(errors='replace')}")


@dataclass(slots=True, eq=False)
class _Work:
    """A lease, and the asyncio task that samples its group."""

    lease: str
    task: Task
    memory_version: int | None  # version of the memory that the group reads; None if there is no memory
    sampling: asyncio.Task[Group] | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """Leases groups and samples them. It is also a `Policy` that samples through the driver."""

    driver: DriverConnection
    lanes: int  # number of groups that are sampled at once
    outbox: Outbox | None = None  # None means that groups are sent over HTTP
    server_wait_s: float = 0.0  # time, in addition to a request's deadline, that the driver waits for a lost server
    cache_use: CacheUse | None = None  # cache use of the policy's servers at the last renewal
    _work: dict[int, _Work] = field(default_factory=dict)  # by group index
    _sent: dict[str, float] = field(default_factory=dict)  # lease of a group in the stream -> time after which it counts as lost
    _attempts: deque[Failure | None] = field(default_factory=deque)
    _alerts: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _events: deque[Event] = field(default_factory=deque)
    _dropped: int = 0  # number of events dropped since the last report
    _heard_at: float = 0.0

    def record_attempt(self, failure: Failure | None) -> None:
        """Queues a report of an ended attempt for the driver (an `AttemptListener`)."""
        self._attempts.append(failure)

    def alert(self, message: str) -> None:
        """Queues an alert for the driver."""
        self._alerts.append(message)

    def record_event(self, event: Event) -> None:
        """Queues an event of an episode for the driver, or drops it if too many events are waiting."""
        if len(self._events) < MAX_WAITING:
            self._events.append(event)
        else:
            self._dropped += 1

    def memory_version(self, group: int) -> int | None:
        """Returns the version of the memory that a leased group reads; None if there is no memory."""
        return self._work[group].memory_version

    def lease_of(self, group: int) -> str | None:
        """Returns the lease of a group; None if the group is not leased to this worker."""
        work = self._work.get(group)
        return None if work is None else work.lease

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Samples one completion through the driver. Raises the errors of `DriverConnection`, and `ServingError` if the lease was lost."""
        work = self._work.get(_group_of(request_id))
        if work is None:
            raise ServingError(f"request {request_id}: its group is no longer leased to this worker")
        request = {"lease": work.lease, "task_key": work.task.key, "prompt_ids": list(prompt_ids), "params": codec.to_data(params)}
        data = request | {"request_id": request_id, "timeout_s": timeout_s}
        return codec.from_json(Completion, await self.driver.call("/generate", data, timeout_s=timeout_s + self.server_wait_s + _MARGIN_S))

    async def run(self, runner: GroupRunner) -> None:
        """Samples groups until the driver no longer responds. Raises `UserError` if the driver rejects a request, and
        `SandboxUnavailable` if this machine cannot open the tasks' sandboxes."""
        self._heard_at = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as working:
            renewing = working.create_task(self._renew())
            sending = [] if self.outbox is None else [working.create_task(self.outbox.run())]
            lanes = [working.create_task(self._lane(runner)) for _ in range(self.lanes)]
            await renewing
            for task in sending + lanes:
                task.cancel()

    async def leave(self) -> None:
        """Returns the leases to the driver, so that other workers can continue the groups at once."""
        with suppress(ServingError, UserError):
            await self.driver.call("/leave", {}, timeout_s=5.0)

    async def _lane(self, runner: GroupRunner) -> None:
        while True:
            try:
                answer = await self.driver.call("/lease", {}, timeout_s=LEASE_WAIT_S + _REQUEST_S)
            except ServingError:  # `_renew` decides when to give up
                await asyncio.sleep(RENEW_S)
                continue
            if answer:
                await self._sample(runner, json.loads(answer))

    async def _sample(self, runner: GroupRunner, lease: Any) -> None:
        index, task = lease["index"], codec.from_json(Task, json.dumps(lease["task"]))
        earlier = self._work.get(index)  # sampled under a lease that was lost while this process was stopped
        work = self._work[index] = _Work(lease["id"], task, lease["memory_version"])
        try:
            if earlier is not None and earlier.sampling is not None:
                earlier.sampling.cancel()
                await asyncio.wait({earlier.sampling})
            work.sampling = asyncio.create_task(runner.run_group(index, task, oldest_version=lease["oldest_version"]))
            await asyncio.wait({work.sampling})
            if not work.sampling.cancelled():
                await self._deliver(work, _result(work.sampling, task, index, runner.group_size))
        finally:
            if work.sampling is not None:
                work.sampling.cancel()
            if self._work.get(index) is work:
                del self._work[index]

    async def _deliver(self, work: _Work, group: Group) -> None:
        if self.outbox is not None and await self.outbox.send(work.lease, group):
            self._sent[work.lease] = time.monotonic() + _SENT_S
            return
        content = await asyncio.to_thread(_content_of, group)
        while True:  # cancelled when the worker exits because the driver does not respond
            with suppress(ServingError):
                await self.driver.call(f"/groups/{work.lease}", content=content)
                return
            await asyncio.sleep(RENEW_S)

    async def _renew(self) -> None:
        """Sends heartbeats until the driver is silent for `_PATIENCE_S` s. A report without a response is resent with the same number."""
        report: dict[str, Any] | None = None
        clock_ns = time.time_ns() - time.monotonic_ns()  # so that a worker with the same name after a reboot has greater numbers
        while True:
            if report is None:
                attempts = [self._attempts.popleft() for _ in range(min(MAX_EVENTS, len(self._attempts)))]
                ended = [None if failure is None else codec.to_data(failure) for failure in attempts]
                alerts = [self._alerts.popleft() for _ in range(len(self._alerts))]  # a thread may append meanwhile
                number = clock_ns + time.monotonic_ns()
                report = {"report": number, "attempts": ended, "alerts": alerts, "events": self._take_events()}
            self._sent = {lease: until for lease, until in self._sent.items() if until > time.monotonic()}
            data = {"leases": [*(work.lease for work in self._work.values()), *self._sent], "activity": ACTIVITY.own()}
            try:
                answer, report = await self.driver.call("/renew", data | report, timeout_s=10.0), None
                self._heard(json.loads(answer))
            except ServingError as error:
                if asyncio.get_running_loop().time() - self._heard_at > _PATIENCE_S:
                    log.warning("this worker ends, because the driver does not answer: %s", error)
                    return
            await asyncio.sleep(RENEW_S)

    def _take_events(self) -> list[str]:
        """Removes the oldest waiting events from the queue, and returns them as lines."""
        lines, size = list[str](), 0
        if self._dropped:
            self._events.appendleft(EventsDropped(count=self._dropped))
            self._dropped = 0
        while self._events and len(lines) < MAX_STREAMED and size < _STREAMED_BYTES:
            lines.append(encode(self._events.popleft()).decode())
            size += len(lines[-1])
        return lines

    def _heard(self, answer: Any) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        use = answer["cache_use"]
        self.cache_use = None if use is None else CacheUse(reading=use["reading"], shares=tuple(use["shares"]))
        for name, (url, key, refused) in answer["judges"].items():
            if (server := registered_servers().get(name)) is not None:
                server.url, server.key, server.refused = url, key, refused
        for lease in answer["abandon"]:
            self._sent.pop(lease, None)
        for work in list(self._work.values()):
            if work.lease in answer["abandon"] and work.sampling is not None:
                work.sampling.cancel()


def _result(sampling: asyncio.Task[Group], task: Task, index: int, size: int) -> Group:
    """Returns the sampled group, or an excluded group if sampling failed. Raises `SandboxUnavailable`."""
    if (error := sampling.exception()) is None:
        return sampling.result()
    if (unavailable := user_code.first_cause(error, SandboxUnavailable)) is not None:
        raise unavailable
    return excluded_group(index, task.id, task.key, failure_from_error(error, stage="group"), size=size)


def _content_of(group: Group) -> bytes:
    """Returns the group as JSON.

    If the group is too large for the driver, returns an excluded group, because an error would stop the worker and lose all of its groups.
    """
    content = codec.to_json(group)
    if len(content) <= MAX_GROUP_BYTES:
        return content
    too_large = ValueError(f"the group has {len(content) >> 20} MiB; a rollout worker can deliver at most {MAX_GROUP_BYTES >> 20} MiB")
    fault = failure_from_error(too_large, stage="store")
    return codec.to_json(excluded_group(group.index, group.task_id, group.task_key, fault, size=len(group.episodes)))


def _group_of(request_id: str) -> int:
    """Returns the index of the group to which a request belongs; -1 if it belongs to no group."""
    head = request_id.partition("-")[0]
    return int(head[1:]) if head[:1] == "g" and head[1:].isdecimal() else -1


class _Notes:
    """The notes from earlier episodes (a `MemorySource`)."""

    def __init__(self, config: MemoryConfig, access: WorkerAccess, worker: Worker) -> None:
        self._config, self._access, self._worker = config, access, worker
        self._store: SearchableNotes | None = None

    def view(self, task: Task, group: int | None) -> StoreView:
        """Returns the memory that a group's attempts read. The driver commits the memory before it queues the group."""
        version = None if group is None else self._worker.memory_version(group)
        assert version is not None, "the groups of a run with a memory are leased with its version"
        if self._store is None:
            self._store = self._access.notes(self._config)
        return StoreView.of(self._store, task, version)


async def work(open_access: Callable[[AsyncExitStack], WorkerAccess], *, worker: str) -> None:
    """Samples groups for the driver of a run until the driver no longer responds or a signal ends the worker.

    Raises `UserError` if the driver accepts no workers or the recipe cannot run on this machine, and `InfrastructureError` if a part fails.
    """
    async with AsyncExitStack() as stack:
        access = open_access(stack)
        driver = DriverConnection(access.url, access.key, worker=worker)
        stack.callback(driver.close)
        spec = WorkerSpec(**json.loads(await driver.call("/spec")))
        root = access.root or Path(spec.root)
        add_project_root(root)
        recipe = build(spec.recipe)
        rollout = recipe.rollout
        lanes = 2 * math.ceil(spec.concurrency / rollout.group.starts_together)  # twice, because groups about to end leave slots free
        one = Worker(driver, lanes, Outbox(open_transport(spec.redis)) if spec.redis else None, recipe.serving.startup_timeout_s)
        await stack.enter_async_context(rare_collections())
        await stack.enter_async_context(DRIVER_LAG.watched(one.alert))
        runner = await _open_runner(stack, recipe, spec, root, access, one)
        working = asyncio.create_task(one.run(runner))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            await one.leave()


async def _open_runner(
    stack: AsyncExitStack, recipe: Recipe, spec: WorkerSpec, root: Path, access: WorkerAccess, worker: Worker
) -> GroupRunner:
    folder, policy = access.folder, await access.policy_folder()
    config = recipe.sandbox.model_copy(update={"max_open": spec.max_open})
    if access.link is None:
        declare_judges(recipe, root=root)
    else:
        declare_judge_servers(recipe, await access.judge_folders(spec.judges), weights=spec.judges)
    family, scorer = open_tasks(recipe, root=root, folder=folder)
    lazily = family.task(Split.TRAIN, 0).sandbox is None
    sandboxes = await open_sandboxes(config, run_label=Path(spec.folder).name, root=root, lazily=lazily)
    stack.push_async_callback(sandboxes.close)
    stack.push_async_callback(close_environments)
    chat = open_chat(policy, policy=recipe.policy, media=access.media)
    tasks = with_sub_agent_tools(candidate_tasks(family), recipe.rollout.delegation)
    declared, memory = declared_tools(recipe.mcp, recipe.tools, root), placeholder_memory(recipe)
    tools = await pin_tools(declared, tasks, sandboxes, folder=folder, every=False, chat=chat, memory=memory)
    pace = Pace(slots=recipe.serving.max_num_seqs * recipe.serving.replicas)
    if spec.pace is not None:
        pace.restore(spec.pace)
    pace.set_idle_token_s(spec.token_s)
    listener = EpisodeEvents(worker.record_event)
    episodes = build_episode_runner(recipe, worker, sandboxes, chat, tools, pace=pace, listener=listener)
    return build_group_runner(
        recipe,
        episodes,
        replace(scorer, sandboxes=sandboxes),
        access.checkpoints(worker.driver, worker.lease_of),
        worker.record_attempt,
        Admission(spec.concurrency, use=lambda: worker.cache_use, full=MAX_CACHE_USE),
        group_judge=open_group_judge(recipe, root=root, folder=folder),
        memory=None if recipe.memory is None else _Notes(recipe.memory, access, worker),
    )


def worker_name(pid: int, *, node: str = "") -> str:
    """Returns the name of a worker. `node`: host name of the worker's machine; empty for this machine."""
    return f"{node or socket.gethostname()}-{pid}"


UNUSABLE = 2
"""Exit code of a worker that cannot work on its host, even if it is restarted, for example because the sandbox backend is missing."""


def main(open_access: Callable[[AsyncExitStack], WorkerAccess], *, parent: int | None = None) -> int:
    """Runs one worker and returns its exit code: 0, `UNUSABLE`, or 1 after an `InfrastructureError`. `open_access`: returns the worker's
    access to its run. The exit stack passed to it closes the access. `parent`: process whose end also ends the worker."""
    if parent is not None:
        die_with_parent(parent)
    raise_file_limit()
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        asyncio.run(work(open_access, worker=worker_name(os.getpid())))
    except Exception as error:
        cause = main_error(error)
        if not isinstance(cause, UserError | InfrastructureError):
            raise
        fix = "\n  fix: check that the run is in progress, and that this machine can reach it" if isinstance(cause, ServingError) else ""
        print(f"error: {cause}{fix}", file=sys.stderr)
        return UNUSABLE if isinstance(cause, UserError) else 1
    return 0


def _main() -> int:
    parser = argparse.ArgumentParser(description="A rollout worker that the driver of a run starts.")
    parser.add_argument("folder", type=Path, help="run folder; with --driver, this host's copy of some of its files")
    parser.add_argument("parent", type=int, nargs="?", help="process id of the parent; the worker exits when the parent exits")
    parser.add_argument("--driver", help="address of the driver; required if this host does not share its disk")
    parser.add_argument("--root", type=Path, default=Path(), help="project folder on this host; only with --driver")
    options = parser.parse_args()
    if options.driver is None:
        return main(lambda stack: WorkerAccess.local(options.folder), parent=options.parent)
    key = take_key()
    options.folder.mkdir(parents=True, exist_ok=True)
    return main(
        lambda stack: WorkerAccess.remote(options.driver, key, stack=stack, root=options.root, folder=options.folder), parent=options.parent
    )


if __name__ == "__main__":
    sys.exit(_main())

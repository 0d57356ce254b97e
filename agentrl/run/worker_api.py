"""The driver's HTTP interface for rollout workers: leases of groups, requests to the policy, and results. Requests need the run's key.

Every token passes through the driver, which withholds the tokens of new weights until the logprob probe of these weights agrees. A worker
therefore never receives tokens from rejected weights, and does not need the address of a server. A worker holds no state that the run
needs.

    GET  /spec            the data that a worker needs to open the run's parts
    POST /lease           the next group; 204 if no group is queued in time
    POST /renew           a heartbeat with ended attempts, alerts, events and activity; the response lists leases to abandon
    POST /generate        one request to the policy
    POST /groups/LEASE    the group that was sampled under a lease
    POST /leave           the worker exits; its groups are assigned to other workers

A worker on a different host, which has no run folder, also uses:

    POST /running/LEASE/MEMBER/KIND   saves an episode in progress (`agentrl.experience.checkpoints`)
    GET  /running/LEASE/MEMBER/KIND   the saved episode; 204 if there is none
    POST /notes                       a search in the notes from earlier episodes
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.base import user_code
from agentrl.base.activity import ACTIVITY, ATTEMPTS, REQUESTS, SANDBOXES, SCORING
from agentrl.base.files import write_atomically
from agentrl.cluster.run_service import WORKER, Route, RunService, bytes_response
from agentrl.errors import ServingError
from agentrl.experience import FolderCheckpoints
from agentrl.experience.checkpoints import MAX_BYTES
from agentrl.gateway.request import RequestError
from agentrl.gateway.wire import body_of, bytes_of, json_response, watch
from agentrl.judge.servers import registered_servers
from agentrl.memory.run_memory import RunMemory
from agentrl.observe.events import EPISODE_EVENTS, decode
from agentrl.observe.run_events import Record
from agentrl.protocols import PolicyServer
from agentrl.records import Completion, Failure, Group, SamplingParams, codec
from agentrl.rollout import AttemptListener
from agentrl.rollout.leases import GroupLeases

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

T = TypeVar("T")

ADDRESS_FILE = "workers.json"
"""File in a run folder that contains the address and the key of the driver. Only the user of the run can read it."""
LEASE_WAIT_S = 20.0
MAX_GROUP_BYTES = 512 << 20
MAX_EVENTS = 256
"""Maximum number of ended attempts, and maximum number of alerts, in one renewal. Together they fit into the largest request body."""
MAX_STREAMED = 2000
"""Maximum number of episode events for the run's event stream in one renewal."""
_BODY_S = 60.0
_NAME_CHARS = 100
_MEMBERS = 1 << 20
_WORKERS = 4096  # maximum number of workers for which repeated reports are recognised


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerApi:
    """Serves workers while `serving` is open.

    `service`: the driver's interface for all parts of the run; if it is not open yet, `serving` opens it.
    """

    folder: Path  # the run folder, which contains the address file
    spec: dict[str, Any] = field(repr=False)  # JSON data, see `agentrl.run.worker.WorkerSpec`; may contain a password
    leases: GroupLeases
    served: PolicyServer
    on_attempt: AttemptListener
    alert: Callable[[str], None]
    memory: RunMemory | None = None
    checkpoints: FolderCheckpoints | None = None  # None if workers have the run folder
    pace: Callable[[], dict[str, Any] | None] = lambda: None  # returns the history of the servers' pace
    record_event: Record = lambda event: None
    service: RunService = field(default_factory=RunService)
    _episodes: dict[str, dict[str, AbstractContextManager[object]]] = field(default_factory=dict)  # lease -> episode -> its routing
    _requests: dict[str, tuple[str, asyncio.Task[Completion]]] = field(default_factory=dict)  # id -> (lease, request to the policy)
    _reports: dict[str, int] = field(default_factory=dict)  # worker -> number of its newest report

    def __post_init__(self) -> None:
        self.leases.on_end = self._end_episodes

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serves workers during the block, at the address in `ADDRESS_FILE`. Raises `InfrastructureError` if it cannot listen."""
        self.service.add(self._routes())
        async with AsyncExitStack() as stack:
            if not self.service.url:
                await stack.enter_async_context(self.service.serving())
            address = json.dumps({"url": self.service.url, "key": self.service.new_key(WORKER)})
            await asyncio.to_thread(write_atomically, self.folder / ADDRESS_FILE, address, private=True)
            try:
                yield
            finally:
                (self.folder / ADDRESS_FILE).unlink(missing_ok=True)
                self.service.revoke(WORKER)
                ACTIVITY.drop_reports()
                for lease in list(self._episodes):
                    self._end_episodes(lease)

    def _routes(self) -> list[Route]:
        running, worker = "/running/{lease}/{member}/{kind}", frozenset({WORKER})
        return [
            Route("GET", "/spec", worker, self._spec),
            Route("POST", "/lease", worker, self._lease),
            Route("POST", "/renew", worker, self._renew),
            Route("POST", "/generate", worker, self._generate),
            Route("POST", "/groups/{lease}", worker, self._finish),
            Route("POST", "/leave", worker, self._leave),
            Route("POST", running, worker, self._save_running),
            Route("GET", running, worker, self._load_running),
            Route("POST", "/notes", worker, self._search_notes),
        ]

    async def _spec(self, request: Request) -> Response:
        return json_response(self.spec | {"token_s": self.served.token_s, "pace": await asyncio.to_thread(self.pace)})

    async def _lease(self, request: Request) -> Response:
        worker = _worker(await body_of(request, _BODY_S))
        lease = await _unless_gone(request, asyncio.create_task(self.leases.take(worker, wait_s=LEASE_WAIT_S)))
        if lease is None:
            return bytes_response(b"", status=204)
        data = {"id": lease.id, "index": lease.index, "oldest_version": lease.oldest_version, "task": codec.to_data(lease.task)}
        version = None if self.memory is None else self.memory.version_of(lease.index)
        return json_response(data | {"memory_version": version})

    async def _renew(self, request: Request) -> Response:
        data = await body_of(request, _BODY_S)
        worker, leases, attempts = _worker(data), [str(lease) for lease in data["leases"]], list(data["attempts"])[:MAX_EVENTS]
        ended = [None if attempt is None else codec.from_json(Failure, json.dumps(attempt)) for attempt in attempts]
        activity = {kind: int(data["activity"].get(kind, 0)) for kind in (ATTEMPTS, SANDBOXES, SCORING)}
        report = int(data["report"])
        if report > (newest := self._reports.pop(worker, 0)):  # not a repetition of a report whose response was lost
            for alert in list(data["alerts"])[:MAX_EVENTS]:
                self.alert(f"worker {worker}: {user_code.printable(str(alert), 2000)}")
            for failure in () if self.leases.was_lost(worker) else ended:
                self.on_attempt(failure)
            for line in list(data["events"])[:MAX_STREAMED]:
                with suppress(ValueError):
                    if isinstance(event := decode(str(line).encode()), EPISODE_EVENTS):
                        self.record_event(event)
        self._reports[worker] = max(newest, report)  # last
        for _ in range(len(self._reports) - _WORKERS):
            del self._reports[next(iter(self._reports))]
        ACTIVITY.report(worker, activity)
        abandoned = await self.leases.renew(worker, leases)
        use = self.served.cache_use
        cache_use = None if use is None else {"reading": use.reading, "shares": use.shares}
        judges = {name: [one.url, one.key, one.refused] for name, one in registered_servers().items()}
        return json_response({"abandon": abandoned, "cache_use": cache_use, "judges": judges})

    async def _generate(self, request: Request) -> Response:
        data = await body_of(request, _BODY_S)
        lease, name, params = str(data["lease"]), str(data["request_id"]), codec.from_json(SamplingParams, json.dumps(data["params"]))
        if not self.leases.is_valid(lease):
            return _lost_lease()
        prompt_ids, timeout_s = [int(token) for token in data["prompt_ids"]], float(data["timeout_s"])
        if (earlier := self._requests.pop(name, None)) is not None:  # from a lost lease or a lost connection
            earlier[1].cancel()
            await asyncio.wait({earlier[1]})
        if not self.leases.is_valid(lease):
            return _lost_lease()
        self._begin_episode(lease, name.rpartition("-")[0], str(data["task_key"]))
        sampling = asyncio.create_task(self.served.generate(prompt_ids, params, request_id=name, timeout_s=timeout_s))
        self._requests[name] = lease, sampling
        try:
            with ACTIVITY.doing(REQUESTS):
                completion = await _unless_gone(request, sampling)
        except ServingError as error:
            return json_response({"error": user_code.error_text(error), "kind": type(error).__name__}, 503)
        finally:
            if self._requests.get(name) == (lease, sampling):
                del self._requests[name]
        return bytes_response(codec.to_json(completion)) if self.leases.is_valid(lease) else _lost_lease()

    async def _finish(self, request: Request) -> Response:
        lease = request.path_params["lease"]
        if not self.leases.is_valid(lease):
            return json_response({"delivered": False})
        content = await bytes_of(request, _BODY_S, most=MAX_GROUP_BYTES)
        group = await asyncio.to_thread(codec.from_json, Group, content)
        return json_response({"delivered": self.leases.finish(lease, group)})

    async def _leave(self, request: Request) -> Response:
        worker = _worker(await body_of(request, _BODY_S))
        if await self.leases.lose(worker, failed=False):
            log.info("worker %s left; its groups go to other workers", worker)
        return json_response({})

    async def _save_running(self, request: Request) -> Response:
        self._running(request)
        body = await bytes_of(request, _BODY_S, most=MAX_BYTES)
        checkpoints, group, member, kind = self._running(request)  # again: if the lease was lost, its next holder saves newer states
        await asyncio.to_thread(checkpoints.receive, group, member, kind, body)
        return json_response({})

    async def _load_running(self, request: Request) -> Response:
        checkpoints, group, member, kind = self._running(request)
        body = await asyncio.to_thread(checkpoints.content, group, member, kind)
        return bytes_response(b"", status=204) if body is None else bytes_response(body, kind="application/octet-stream")

    def _running(self, request: Request) -> tuple[FolderCheckpoints, int, int, str]:
        """Returns the checkpoints, and the group, attempt and kind in a request. Raises `RequestError` if the lease in the request was
        lost."""
        group = self.leases.group_of(request.path_params["lease"])
        member, kind = int(request.path_params["member"]), request.path_params["kind"]
        if self.checkpoints is None or not 0 <= member < _MEMBERS or kind not in ("state", "scored"):
            raise RequestError("not_found", "no such episode in progress")
        if group is None:
            raise RequestError("failed", "the lease is lost")
        return self.checkpoints, group, member, kind

    async def _search_notes(self, request: Request) -> Response:
        data = await body_of(request, _BODY_S)
        if self.memory is None:
            raise RequestError("not_found", "the run has no memory")
        query, names = str(data["query"]), {name: str(data[name]) for name in ("scope", "task_key")}
        matches = await asyncio.to_thread(self.memory.search, query, version=int(data["version"]), **names)
        return json_response([asdict(match) for match in matches])

    def _begin_episode(self, lease: str, episode: str, task_key: str) -> None:
        """Registers an episode with the routing of the servers until its lease ends."""
        episodes = self._episodes.setdefault(lease, {})
        if episode not in episodes:
            routing = episodes[episode] = self.served.episode(episode, task_key)
            routing.__enter__()

    def _end_episodes(self, lease: str) -> None:
        """Cancels the requests and ends the routing for a lease that ended."""
        for of_lease, sampling in self._requests.values():
            if of_lease == lease:
                sampling.cancel()
        for routing in self._episodes.pop(lease, {}).values():
            routing.__exit__(None, None, None)


async def _unless_gone(request: Request, result: asyncio.Task[T]) -> T:
    """Returns the result of a task. Cancels the task if the worker closes its connection.

    Raises `RequestError` if the worker disconnects or the task is cancelled.
    """
    disconnected = asyncio.Event()
    watching, waiting = asyncio.create_task(watch(request, disconnected)), asyncio.create_task(disconnected.wait())
    try:
        await asyncio.wait({result, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise RequestError("failed", "the worker disconnected")
        if result.cancelled():
            raise RequestError("failed", "the lease is lost")
        return result.result()
    finally:
        result.cancel()
        watching.cancel()
        waiting.cancel()


def _lost_lease() -> Response:
    return json_response({"error": "the lease is lost", "kind": "ServingError"}, 503)


def _worker(data: Any) -> str:
    """Returns the name of the worker that sent a request. Raises `ValueError` if the name is invalid."""
    name = data["worker"]
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS:
        raise ValueError(f"worker must be a name of 1 to {_NAME_CHARS} characters")
    return user_code.printable(name, _NAME_CHARS)

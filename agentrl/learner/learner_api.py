"""The driver's HTTP routes for a learner that does not share the driver's disk: ledger, registry and records
(`agentrl.learner.remote_access`).

    POST /learner/METHOD    {"id": ..., ...}: a call, which is executed only once per id
    POST /learner/group     {"index": ...}: one group of the ledger
    PUT  /updates/STEP/RANK     the tokens that a rank recorded (`agentrl.experience.token_records`), for readers

Calls are executed one at a time, in the order of their arrival. The key is checked again when a call's turn comes, so after a
call from a new learner, no call from the learner that it replaced is executed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.cluster.chunks import checkpoints_to_drop, drop_folders, numbered_folders
from agentrl.cluster.file_service import FileService
from agentrl.cluster.run_service import LEARNER, Route, RunService, bytes_response, call_once, check_key_again
from agentrl.experience import DriverStore, token_records
from agentrl.gateway.request import RequestError, read_json
from agentrl.gateway.wire import body_of, bytes_of, json_response
from agentrl.learner.access import FolderAccess
from agentrl.learner.update_guard import UpdateFailure
from agentrl.protocols import VersionRegistry
from agentrl.records import GroupUse, PolicyVersion, VersionState, codec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")

MAX_CALL = 512 << 20
"""Maximum size of a call, in bytes. The largest calls contain the uses of a step or the setbacks of an update."""
_BODY_S = 120.0
_READS = frozenset(
    {"entries", "get", "latest", "verify", "pinned", "pending_rollback", "find_server"}
)  # executed again if a call is repeated


class LearnerApi:
    """The routes for one run.

    Args:
        store: the driver's store. Calls that use it run on its thread.
        registry: used from several threads.
    """

    def __init__(self, folder: Path, store: DriverStore, registry: VersionRegistry) -> None:
        self._folder, self._store, self._registry = folder, store, registry
        self._calls: dict[str, asyncio.Task[Any]] = {}
        self._turn = asyncio.Lock()  # keeps the calls in order: waiting calls acquire it in order of arrival
        self._records = asyncio.Lock()
        self._methods: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "entries": self._entries,
            "assign": self._assign,
            "commit": self._commit,
            "reconcile": self._reconcile,
            "record_uses": self._record_uses,
            "record_setbacks": self._record_setbacks,
            "forget_setbacks": self._forget_setbacks,
            "prune_checkpoints": self._prune_checkpoints,
            "pending_rollback": self._pending_rollback,
            "find_server": self._find_server,
            "add": self._add,
            "get": self._get,
            "latest": self._latest,
            "set_state": self._set_state,
            "verify": self._verify,
            "reconcile_versions": self._reconcile_versions,
            "pinned": self._pinned,
            "prune": self._prune,
        }

    def routes(self) -> list[Route]:
        """Returns the routes, which only the learner may use."""
        learner = frozenset({LEARNER})
        return [
            Route("POST", "/learner/group", learner, self._group),
            Route("POST", "/learner/{method}", learner, self._call),
            Route("PUT", "/updates/{step}/{rank}", learner, self._tokens),
        ]

    async def _call(self, request: Request) -> Response:
        name = request.path_params["method"]
        method = self._methods.get(name)
        if method is None:
            raise RequestError("invalid", f"the learner API has no method {name[:100]!a}")
        data = read_json(await bytes_of(request, _BODY_S, most=MAX_CALL))

        async def in_turn() -> Any:
            async with self._turn:
                check_key_again(request)
                return await method(data)

        return json_response(await (in_turn() if name in _READS else call_once(self._calls, str(data["id"])[:100], in_turn)))

    async def _group(self, request: Request) -> Response:
        index = int((await body_of(request, _BODY_S))["index"])
        (group,) = await self._store.groups((index,))
        return bytes_response(await asyncio.to_thread(codec.to_json, group))

    async def _tokens(self, request: Request) -> Response:
        step, rank = (int(request.path_params[name]) for name in ("step", "rank"))
        content = await bytes_of(request, _BODY_S, most=token_records.MAX_FILE)
        async with self._records:  # saving a file may remove other files
            check_key_again(request)
            await asyncio.to_thread(token_records.save_file, self._folder, step, rank, content)
        return json_response({})

    async def _entries(self, data: Any) -> Any:
        first, step = (None if data[name] is None else int(data[name]) for name in ("first", "step"))
        return await self._store.call(lambda store: [codec.to_data(entry) for entry in store.entries(first=first, step=step)])

    async def _assign(self, data: Any) -> None:
        step, indices = int(data["step"]), [int(index) for index in data["indices"]]
        await self._store.call(lambda store: store.assign(step, indices))

    async def _commit(self, data: Any) -> None:
        step, uses, checkpoint = int(data["step"]), _uses(data["uses"]), str(data["checkpoint"])[:100]
        await self._store.call(lambda store: store.commit(step, uses, checkpoint))

    async def _reconcile(self, data: Any) -> None:
        steps, sha256 = int(data["steps"]), str(data["sha256"])
        await self._access(lambda access: access.reconcile(steps, sha256))

    async def _record_uses(self, data: Any) -> None:
        uses = _uses(data["uses"])
        await self._access(lambda access: access.record_uses(uses))

    async def _record_setbacks(self, data: Any) -> None:
        setbacks = tuple(codec.from_json(UpdateFailure, json.dumps(setback)) for setback in data["setbacks"])
        await self._access(lambda access: access.record_setbacks(setbacks))

    async def _forget_setbacks(self, data: Any) -> None:
        step = int(data["step"])
        await self._access(lambda access: access.forget_setbacks(step))

    async def _prune_checkpoints(self, data: Any) -> None:
        keep, spare = max(1, int(data["keep"])), [int(number) for number in data["spare"]]

        def prune() -> None:
            names = numbered_folders(self._folder, "checkpoints")
            drop_folders(self._folder, "checkpoints", checkpoints_to_drop(names, keep, spare))

        await asyncio.to_thread(prune)

    async def _pending_rollback(self, data: Any) -> Any:
        request = await self._access(lambda access: access.pending_rollback())
        return None if request is None else codec.to_data(request)

    async def _find_server(self, data: Any) -> Any:
        server = await self._access(lambda access: access.find_server())
        return None if server is None else asdict(server)

    async def _add(self, data: Any) -> None:
        version = codec.from_json(PolicyVersion, json.dumps(data["version"]))
        if version.folder != f"versions/{version.number:06d}":
            raise ValueError(f"version {version.number} cannot be stored in {version.folder[:200]!a}")
        await asyncio.to_thread(self._registry.add, version)

    async def _get(self, data: Any) -> Any:
        return _version(await asyncio.to_thread(self._registry.get, int(data["number"])))

    async def _latest(self, data: Any) -> Any:
        return _version(await asyncio.to_thread(self._registry.latest, *map(VersionState, data["states"])))

    async def _set_state(self, data: Any) -> None:
        await asyncio.to_thread(self._registry.set_state, int(data["number"]), VersionState(data["state"]))

    async def _verify(self, data: Any) -> None:
        version = codec.from_json(PolicyVersion, json.dumps(data["version"]))
        known = await asyncio.to_thread(self._registry.get, version.number)
        if known is None or known.folder != version.folder:
            raise ValueError(f"version {version.number} is not registered")
        await asyncio.to_thread(self._registry.verify, version)

    async def _reconcile_versions(self, data: Any) -> Any:
        return await asyncio.to_thread(self._registry.reconcile, int(data["newest"]))

    async def _pinned(self, data: Any) -> Any:
        return sorted(await asyncio.to_thread(self._registry.pinned))

    async def _prune(self, data: Any) -> Any:
        return await asyncio.to_thread(self._registry.prune, max(1, int(data["keep"])))

    async def _access(self, function: Callable[[FolderAccess], T]) -> T:
        """Calls `function` with a `FolderAccess` on the store's thread, and returns its result."""
        return await self._store.call(lambda store: function(FolderAccess(self._folder, store, self._registry)))


class LearnerSessions:
    """Keys for a run's learners on other hosts. Only one key is valid at a time."""

    def __init__(self, service: RunService, files: FileService) -> None:
        self._service, self._files = service, files

    @property
    def url(self) -> str:
        """The address of the driver."""
        return self._service.url

    async def start(self) -> str:
        """Returns a new key for the learner that is about to start. From then on, requests from earlier learners receive status 409."""
        self._service.revoke(LEARNER)
        await self._files.stop_arrivals()
        return self._service.new_key(LEARNER)


def _uses(data: Any) -> dict[int, GroupUse]:
    return {int(index): codec.from_json(GroupUse, json.dumps(use)) for index, use in data.items()}


def _version(version: PolicyVersion | None) -> Any:
    return None if version is None else codec.to_data(version)

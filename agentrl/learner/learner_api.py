"""The driver's HTTP routes for a learner that does not share the driver's disk: ledger, registry and records
(`agentrl.learner.remote_access`).

    POST /learner/METHOD    {"id": ..., ...}: a call; if it changes data, it is executed only once per id
    POST /learner/group     {"index": ...}: one group of the ledger
    PUT  /updates/STEP/RANK     the tokens that a rank recorded (`agentrl.experience.token_records`), for readers

Calls are executed one at a time, in the order of their arrival. The key is checked again immediately before a call is executed, so after a
call from a new learner, no call from the learner that it replaced is executed.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cluster.chunks import checkpoints_to_drop, drop_folders, numbered_folders
from agentrl.cluster.file_service import FileService
from agentrl.cluster.run_service import LEARNER, Route, RunService, bytes_response, call_once, check_key_again
from agentrl.experience import DriverStore, token_records
from agentrl.gateway.checks import mapping
from agentrl.gateway.request import RequestError, read_json
from agentrl.gateway.wire import body_of, bytes_of, json_response
from agentrl.learner.access import FolderAccess
from agentrl.learner.update_guard import UpdateFailure
from agentrl.protocols import VersionRegistry
from agentrl.records import GroupUse, PolicyVersion, VersionState, codec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MAX_CALL = 512 << 20
"""Maximum size of a call, in bytes. The largest calls contain the uses of a step or the setbacks of an update."""
_BODY_S = 120.0
_STORE_METHODS = frozenset(
    ("entries", "assign", "commit", "reconcile", "record_uses", "record_setbacks", "forget_setbacks", "pending_rollback", "find_server")
)
"""Calls that are executed on the store's thread."""
_REGISTRY_METHODS = frozenset(("add", "get", "latest", "set_state", "verify", "reconcile_versions", "pinned", "prune", "prune_checkpoints"))
"""Calls that are executed on a different thread, because some of them read or delete gigabytes."""
_READS = frozenset(("entries", "get", "latest", "verify", "pinned", "pending_rollback", "find_server"))
"""Calls that are executed again if they are repeated."""


class LearnerApi:
    """The routes for one run.

    Args:
        store: the driver's store. Calls that use the store run on the store's thread.
        registry: the driver's registry, which is used from several threads.
    """

    def __init__(self, folder: Path, store: DriverStore, registry: VersionRegistry) -> None:
        self._folder, self._store, self._registry = folder, store, registry
        self._calls: dict[str, asyncio.Task[Any]] = {}
        self._turn = asyncio.Lock()  # keeps the calls in order: waiting calls acquire it in order of arrival
        self._records = asyncio.Lock()

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
        if name not in _STORE_METHODS | _REGISTRY_METHODS:
            raise RequestError("invalid", f"the learner API has no method {name[:100]!a}")
        data = read_json(await bytes_of(request, _BODY_S, most=MAX_CALL))

        async def in_turn() -> Any:
            async with self._turn:
                check_key_again(request)
                if name in _REGISTRY_METHODS:
                    return await asyncio.to_thread(_call_registry, name, data, self._registry, self._folder)
                return await self._store.call(lambda store: _call_store(name, data, FolderAccess(self._folder, store, self._registry)))

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


def _call_store(name: str, data: Any, access: FolderAccess) -> Any:
    """Executes a call in `_STORE_METHODS` and returns its result as JSON data."""
    match name:
        case "entries":
            first, step = (None if data[key] is None else int(data[key]) for key in ("first", "step"))
            return [codec.to_data(entry) for entry in access.store.entries(first=first, step=step)]
        case "assign":
            access.store.assign(int(data["step"]), [int(index) for index in data["indices"]])
        case "commit":
            access.store.commit(int(data["step"]), _uses(data["uses"]), str(data["checkpoint"])[:100])
        case "reconcile":
            access.reconcile(int(data["steps"]), str(data["sha256"]))
        case "record_uses":
            access.record_uses(_uses(data["uses"]))
        case "record_setbacks":
            access.record_setbacks(tuple(codec.from_json(UpdateFailure, json.dumps(setback)) for setback in data["setbacks"]))
        case "forget_setbacks":
            access.forget_setbacks(int(data["step"]))
        case "pending_rollback":
            return None if (request := access.pending_rollback()) is None else codec.to_data(request)
        case "find_server":
            return None if (server := access.find_server()) is None else asdict(server)
    return None


def _call_registry(name: str, data: Any, registry: VersionRegistry, folder: Path) -> Any:
    """Executes a call in `_REGISTRY_METHODS` and returns its result as JSON data."""
    match name:
        case "add":
            version = codec.from_json(PolicyVersion, json.dumps(data["version"]))
            if version.folder != f"versions/{version.number:06d}":
                raise ValueError(f"version {version.number} cannot be stored in {version.folder[:200]!a}")
            registry.add(version)
        case "get":
            return _version(registry.get(int(data["number"])))
        case "latest":
            return _version(registry.latest(*map(VersionState, data["states"])))
        case "set_state":
            registry.set_state(int(data["number"]), VersionState(data["state"]))
        case "verify":
            version = codec.from_json(PolicyVersion, json.dumps(data["version"]))
            known = registry.get(version.number)
            if known is None or known.folder != version.folder:
                raise ValueError(f"version {version.number} is not registered")
            registry.verify(version)
        case "reconcile_versions":
            return registry.reconcile(int(data["newest"]))
        case "pinned":
            return sorted(registry.pinned())
        case "prune":
            return registry.prune(max(1, int(data["keep"])))
        case "prune_checkpoints":
            keep, spare = max(1, int(data["keep"])), [int(number) for number in data["spare"]]
            names = numbered_folders(folder, "checkpoints")
            drop_folders(folder, "checkpoints", checkpoints_to_drop(names, keep, spare))
    return None


def _uses(data: Any) -> dict[int, GroupUse]:
    return {int(index): codec.from_json(GroupUse, json.dumps(use)) for index, use in mapping(data, "uses").items()}


def _version(version: PolicyVersion | None) -> Any:
    return None if version is None else codec.to_data(version)

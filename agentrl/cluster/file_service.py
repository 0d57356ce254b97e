"""The driver's HTTP routes for the files of a run, for hosts that do not share its disk. Mirrors use them (`agentrl.cluster.mirror`).

    GET  /files/KIND                names of the complete folders
    GET  /files/KIND/NUMBER         their files, with the sha256 of each chunk
    GET  /files/judges/NAME         the files of a judge's model, likewise
    GET  /chunks/SHA256             one chunk of a listed folder
    GET  /single/NAME               one of the few single files that parts need
    GET, PUT  /media/NAME           an image of an episode, which the rollout worker stores
    POST /peers                     a mirror starts to fetch a folder; the response lists the mirrors that have it or are fetching it, and
                                    the URL of the run in the object store if the store has the folder
    POST /arriving/KIND/NUMBER      a listing that the learner will send; the response lists the missing chunks
    PUT  /arriving/KIND/NUMBER/SHA256
    POST /arriving/KIND/NUMBER/commit
    PUT  /base_probe                the probe of version 0, which the learner computes

Chunks are requested by checksum, so no request contains a path to read. Only the learner may send folders. Workers can list only the files
of version 0 and of judges, whose tokenizers they need, so they cannot request the chunks of other folders. All file access runs in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.base.files import write_atomically
from agentrl.base.media import MAX_STORED, PNG, MediaFolder
from agentrl.base.untrusted_files import read_bytes
from agentrl.cluster.chunks import (
    CHUNK,
    JUDGES,
    ArrivingFolder,
    ChunkIndex,
    FolderListing,
    fetched_path,
    folder_path,
    numbered_folders,
)
from agentrl.cluster.object_store import ObjectStore
from agentrl.cluster.run_service import HOST, LEARNER, WORKER, Route, bytes_response, call_once, check_key_again
from agentrl.errors import DiskFull, InfrastructureError
from agentrl.gateway.request import RequestError
from agentrl.gateway.wire import body_of, bytes_of, json_response
from agentrl.records import codec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

T = TypeVar("T")

SINGLE_FILES = ("recipe.json", "pace.json", "mcp.json")
"""Single files of a run folder that parts on other hosts read."""
_BASE = "versions/000000"
BASE_PROBE = f"{_BASE}/probe.json"
"""The only file that the learner adds to an existing folder."""
MAX_SINGLE = 64 << 20
MAX_LISTING = 512 << 20
"""Maximum bytes of a listing, which has about 80 bytes for each MiB in the folder."""
MAX_PEERS = 256
"""Maximum number of mirrors that are stored for a folder; only the newest are kept."""
MAX_ARRIVING = 4
"""Maximum number of folders that arrive at a time. If there are more, the oldest is dropped, but its chunks stay on disk."""
_FOLDERS_WITH_PEERS = 16
_IMAGE = re.compile(r"[0-9a-f]{10}")
_BODY_S = 120.0
_READS = 16  # number of threads that read or hash at a time
_SPARE_BYTES = 64 << 20  # reserved on the driver's disk for the ledger and the logs


class FileService:
    """The routes for one run folder."""

    def __init__(
        self,
        folder: Path,
        *,
        judges: Mapping[str, Path] | None = None,
        store: ObjectStore | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """`judges`: model folders of judges by name. `store`: the object store from which hosts read versions. `alert`: called with
        messages for the user."""
        self.folder, self._judges, self._store, self._alert = folder, dict(judges or {}), store, alert
        self._uploads: dict[str, asyncio.Task[Any]] = {}
        self.index = ChunkIndex()
        self._arriving: dict[str, ArrivingFolder] = {}  # by kind/number
        self._peers: dict[str, dict[str, str]] = {}  # kind/number -> address of a mirror -> its key, in the order of their starts
        self._listings: dict[Path, asyncio.Task[bytes]] = {}  # listings being computed
        self._reads = asyncio.Semaphore(_READS)
        self._opening = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Returns the routes, each with the parts that may use it."""
        mirrors, readers = frozenset({HOST, LEARNER}), frozenset({HOST, LEARNER, WORKER})
        return [
            Route("GET", f"/files/{_BASE}", readers, self._base_listing),
            Route("GET", f"/files/{JUDGES}/{{name}}", readers, self._judge_listing),
            Route("GET", "/files/{kind}", mirrors, self._names),
            Route("GET", "/files/{kind}/{number}", mirrors, self._listing),
            Route("GET", "/chunks/{sha256}", readers, self._chunk),
            Route("GET", "/single/{name}", readers, self._single),
            Route("GET", "/media/{name}", readers, self._image),
            Route("PUT", "/media/{name}", frozenset({WORKER}), self._store_image),
            Route("POST", "/peers", frozenset({HOST}), self._join),
            Route("POST", "/arriving/{kind}/{number}", frozenset({LEARNER}), self._begin),
            Route("PUT", "/arriving/{kind}/{number}/{sha256}", frozenset({LEARNER}), self._write),
            Route("POST", "/arriving/{kind}/{number}/commit", frozenset({LEARNER}), self._commit),
            Route("PUT", "/base_probe", frozenset({LEARNER}), self._probe),
        ]

    async def stop_arrivals(self) -> None:
        """Rejects further chunks of all arriving folders, because their sender was replaced."""
        async with self._opening:
            for name in list(self._arriving):
                await self._stop(name)

    async def _stop(self, name: str) -> None:
        if (arriving := self._arriving.pop(name, None)) is not None:
            await asyncio.to_thread(arriving.close)

    async def _names(self, request: Request) -> Response:
        return json_response(await self._in_thread(lambda: numbered_folders(self.folder, request.path_params["kind"])))

    async def _base_listing(self, request: Request) -> Response:
        return await self._listing_of(folder_path(self.folder, *_BASE.split("/")))

    async def _listing(self, request: Request) -> Response:
        return await self._listing_of(folder_path(self.folder, request.path_params["kind"], request.path_params["number"]))

    async def _judge_listing(self, request: Request) -> Response:
        if (path := self._judges.get(name := request.path_params["name"])) is None:
            raise RequestError("not_found", f"the run has no judge server {name[:100]!a}")
        return await self._listing_of(path, links=True)

    async def _listing_of(self, path: Path, *, links: bool = False) -> Response:
        if (listing := self._listings.get(path)) is None:  # hashing may take minutes, and hosts repeat the request
            listing = asyncio.create_task(self._in_thread(lambda: codec.to_json(self.index.list_folder(path, links=links))))
            self._listings[path] = listing
            listing.add_done_callback(lambda _: self._listings.pop(path))
        try:
            return bytes_response(await asyncio.shield(listing))
        except FileNotFoundError:
            raise RequestError("not_found", f"{path.parent.name}/{path.name} does not exist") from None

    async def _chunk(self, request: Request) -> Response:
        sha256 = request.path_params["sha256"]
        data = await self._in_thread(lambda: self.index.read(sha256))
        if data is None:
            raise RequestError("not_found", "this host does not have the chunk")
        return bytes_response(data, kind="application/octet-stream")

    async def _single(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in SINGLE_FILES:
            raise RequestError("not_found", f"{name[:100]!a} is not one of {', '.join(SINGLE_FILES)}")
        try:
            content = await self._in_thread(lambda: read_bytes(self.folder / name, most=MAX_SINGLE, inside=self.folder))
        except FileNotFoundError:
            raise RequestError("not_found", f"the run has no {name}") from None
        return bytes_response(content)

    async def _image(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not _IMAGE.fullmatch(name) or not (self.folder / "media" / f"{name}.png").is_file():
            raise RequestError("not_found", f"the run has no image {name[:100]!a}")
        return bytes_response(await self._in_thread(lambda: MediaFolder(self.folder).read(name)), kind="image/png")

    async def _store_image(self, request: Request) -> Response:
        name, png = request.path_params["name"], await bytes_of(request, _BODY_S, most=MAX_STORED)
        if not png.startswith(PNG) or hashlib.sha256(png).hexdigest()[: len(name)] != name or not _IMAGE.fullmatch(name):
            raise RequestError("invalid", f"the content does not match the image name {name[:100]!a}")
        await self._in_thread(lambda: MediaFolder(self.folder).put(png))
        return json_response({})

    async def _join(self, request: Request) -> Response:
        """Responds with the mirrors that started to fetch the folder earlier, the newest first. Mirrors thus form a chain in which each
        chunk is sent once from each mirror to the next."""
        data = await body_of(request, _BODY_S)
        folder, url, key = str(data["folder"]), str(data["url"])[:200], str(data["key"])[:200]
        fetched_path(self.folder, *folder.split("/", 1))
        peers = self._peers.setdefault(folder, {})
        peers.pop(url, None)
        earlier = [{"url": other, "key": other_key} for other, other_key in reversed(peers.items())]
        peers[url] = key
        while len(peers) > MAX_PEERS:
            del peers[next(iter(peers))]
        while len(self._peers) > _FOLDERS_WITH_PEERS:
            del self._peers[next(iter(self._peers))]
        return json_response({"mirrors": earlier, "store": await self._stored(folder)})

    async def _stored(self, name: str) -> str:
        """Uploads the version `name` and returns the URL of the object store; an empty string for other folders, if there is no store, or
        if the upload failed."""
        if (store := self._store) is None or not name.startswith("versions/"):
            return ""
        path = self.folder / name
        listing = await self._in_thread(lambda: self.index.list_folder(path))

        def upload() -> str:
            try:
                store.upload(name, path, listing)
                store.drop_others(numbered_folders(self.folder, "versions"))
            except InfrastructureError as error:
                self._alert(f"{name} is not in the object store: {error}\n  hosts fetch it from the driver and from each other instead")
                return ""
            return store.url

        return str(await call_once(self._uploads, f"{name} {hash(listing)}", lambda: asyncio.to_thread(upload)))

    async def _begin(self, request: Request) -> Response:
        kind, number = request.path_params["kind"], request.path_params["number"]
        final = folder_path(self.folder, kind, number)
        content = await bytes_of(request, _BODY_S, most=MAX_LISTING)
        listing = await self._in_thread(lambda: codec.from_json(FolderListing, content))
        async with self._opening:
            check_key_again(request)
            await self._stop(f"{kind}/{number}")
            arriving = self._arriving[f"{kind}/{number}"] = await self._in_thread(lambda: self._open(final, listing))
            while len(self._arriving) > MAX_ARRIVING:
                await self._stop(next(iter(self._arriving)))
        return json_response(arriving.missing)

    def _open(self, final: Path, listing: FolderListing) -> ArrivingFolder:
        final.parent.mkdir(exist_ok=True)
        arriving = ArrivingFolder(final, listing, self.index)
        needs, free = min(arriving.missing_bytes, listing.size), shutil.disk_usage(final.parent).free
        if not arriving.unchanged and needs + _SPARE_BYTES > free:
            raise DiskFull(f"no room for {final}: {needs >> 20} MiB are needed, {free >> 20} MiB are free")
        return arriving

    async def _write(self, request: Request) -> Response:
        arriving, sha256 = self._arriving_of(request), request.path_params["sha256"]
        data = await bytes_of(request, _BODY_S, most=CHUNK)
        await self._in_thread(lambda: arriving.write(sha256, data))
        return json_response({})

    async def _commit(self, request: Request) -> Response:
        arriving = self._arriving_of(request)
        async with self._opening:
            check_key_again(request)
            await self._in_thread(arriving.commit)
        return json_response({})

    async def _probe(self, request: Request) -> Response:
        content = await bytes_of(request, _BODY_S)
        check_key_again(request)
        await self._in_thread(lambda: write_atomically(self.folder / BASE_PROBE, content, durable=True))
        return json_response({})

    def _arriving_of(self, request: Request) -> ArrivingFolder:
        name = f"{request.path_params['kind']}/{request.path_params['number']}"
        if (arriving := self._arriving.get(name)) is None:
            raise RequestError("not_found", f"{name} is not being received: send its listing first")
        return arriving

    async def _in_thread(self, function: Callable[[], T]) -> T:
        async with self._reads:
            return await asyncio.to_thread(function)

"""A host's copy of a run folder, for parts that run on a host without access to the driver's disk.

`fetch` copies a version or checkpoint from the driver, and `push` sends the driver a version or checkpoint that the learner wrote here.
Both functions transfer only missing chunks, check each chunk, and continue after an interruption. A folder is renamed to its final name
when it is complete. Mirrors that fetch the same folder form a chain: each fetches chunks from the mirror that started before it. Therefore,
the driver sends a folder only about once, regardless of the number of mirrors.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

from agentrl.base.error_text import disk_full_error
from agentrl.base.files import wait_for_lock, write_atomically
from agentrl.base.media import MediaFolder
from agentrl.cluster.chunks import (
    CHUNK,
    ArrivingFolder,
    ChunkIndex,
    FileChunks,
    FolderListing,
    drop_folders,
    fetched_path,
    folder_path,
    numbered_folders,
)
from agentrl.cluster.link import Link, LinkLost, NotFound
from agentrl.cluster.object_store import PIECE, ObjectStore
from agentrl.errors import DiskFull, InfrastructureError, UserError
from agentrl.records import codec

log = logging.getLogger(__name__)

T = TypeVar("T")

TRANSFER_S = 1800.0
"""Default deadline of a transfer, in seconds."""
_THREADS = 3  # number of transfers at a time: with more, a chain of mirrors forwards each chunk later
_CHUNK_S = 120.0  # deadline of one chunk from the driver
_PEER_S = 10.0  # deadline of one chunk from another mirror, which may itself wait for the chunk
_PEERS = 2  # number of mirrors that are tried
_TRIES = 5  # attempts to fetch a chunk that arrives damaged
_LOCK = ".mirror.lock"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".delta")


def mirrored_media(folder: Path, link: Link) -> MediaFolder:
    """Returns a folder for a run's images on a host that does not have the run folder. Images are copied from the driver to `folder`, and
    new images are sent to the driver."""
    return MediaFolder(
        folder,
        fetch=lambda name: link.call("GET", f"/media/{name}"),
        send=lambda name, png: link.call("PUT", f"/media/{name}", png),
    )


class Mirror:
    """The mirror in `folder`. Safe for use by several threads and processes on the host.

    Args:
        link: the driver.
        index: the chunks of this host, which `agentrl.cluster.mirror_host.relaying` serves to other hosts.
        relay: address and key at which they are served; None means that this host serves no chunks to other hosts.
    """

    def __init__(self, folder: Path, link: Link, *, index: ChunkIndex | None = None, relay: tuple[str, str] | None = None) -> None:
        self.folder, self.link = folder, link
        self.index = index or ChunkIndex()
        self.relay = relay
        self.expected: frozenset[str] = frozenset()  # checksums of chunks that will arrive
        folder.mkdir(parents=True, exist_ok=True)

    def fetch(self, name: str, *, timeout_s: float = TRANSFER_S, into: Path | None = None, weights: bool = True) -> Path:
        """Updates the local copy of `versions/000012`, `checkpoints/000012`, `judges/NAME` or a single file to match the driver's. Returns
        its path.

        Args:
            into: path for the folder, instead of its path in this mirror.
            weights: whether to fetch files that contain weights too.

        Raises `NotFound` if the driver does not have the folder or file, `DiskFull` if the disk is full, `LinkLost` if the driver does not
        respond in time, the other errors of `Link.call`, and `InfrastructureError` for any other fault on this host.
        """
        if "/" not in name:
            return self._fetch_file(name)
        with _local_errors(f"{name} in {self.folder}"), self._locked(timeout_s):
            return self._fetch_folder(name, into, time.monotonic() + timeout_s, weights=weights)

    def push(self, name: str, *, timeout_s: float = TRANSFER_S) -> None:
        """Sends the driver a folder that is complete on this host. Returns when the driver has the complete folder. Raises the errors of
        `fetch`."""
        kind, number = name.split("/")
        path, deadline = folder_path(self.folder, kind, number), time.monotonic() + timeout_s
        with _local_errors(str(path)):
            listing = self.index.list_folder(path)
        while True:
            try:
                self.send(name, self.announce(name, listing, timeout_s=_left(deadline)), timeout_s=_left(deadline))
                self.complete(name, timeout_s=_left(deadline))
                return
            except NotFound as error:  # the driver no longer has the listing
                if time.monotonic() > deadline:
                    raise LinkLost(f"{name} was not complete at the driver within {timeout_s:g} s: {error}") from error

    def announce(self, name: str, listing: FolderListing, *, timeout_s: float = TRANSFER_S) -> list[str]:
        """Announces a folder with these files to the driver, and returns the checksums of the chunks that the driver lacks. Raises the
        errors of `Link.json`, such as `DiskFull`."""
        data = self.link.json("POST", f"/arriving/{name}", codec.to_data(listing), timeout_s=timeout_s)
        return [str(sha256) for sha256 in data]

    def send(self, name: str, chunks: Sequence[str], *, timeout_s: float = TRANSFER_S) -> None:
        """Sends chunks of an announced folder. Raises the errors of `fetch`."""
        deadline = time.monotonic() + timeout_s

        def send(sha256: str) -> None:
            data = self.index.read(sha256)
            if data is None:
                raise InfrastructureError(f"{name} changed while it was sent: a chunk has disappeared")
            self.link.call("PUT", f"/arriving/{name}/{sha256}", data, timeout_s=min(_CHUNK_S, _left(deadline)))

        self._for_each(chunks, send)

    def complete(self, name: str, *, timeout_s: float = TRANSFER_S) -> None:
        """Completes a folder on the driver after all its chunks were sent. Returns when the folder is durable at the driver. Raises the
        errors of `Link.json`: `NotFound` means that the folder must be announced again."""
        self.link.json("POST", f"/arriving/{name}/commit", {}, timeout_s=timeout_s)

    def names(self, kind: str) -> list[str]:
        """Returns the names of the driver's complete folders of a kind, in ascending order."""
        return [str(name) for name in self.link.json("GET", f"/files/{kind}")]

    def drop_extra(self, kind: str, *, keep: Sequence[str] = (), unsent: bool = True) -> None:
        """Deletes the mirror's folders of a kind that the driver does not have, except those named in `keep`, including partial folders
        from interrupted transfers.

        `unsent`: whether to delete folders that are newer than all folders on the driver, too. A learner on this host may still be writing
        such a folder.
        """
        there = {*self.names(kind), *keep}
        before = float("inf") if unsent else max(map(int, there), default=0)
        with _local_errors(str(self.folder / kind)), self._locked(TRANSFER_S):
            extra = [name for name in numbered_folders(self.folder, kind) if name not in there and int(name) < before]
            drop_folders(self.folder, kind, extra)
            for part in (self.folder / kind).glob(".*.part"):
                name = part.name[1:-5]
                if name not in there and name.isdecimal() and int(name) < before:
                    shutil.rmtree(part, ignore_errors=True)
        for name in extra:
            self.index.forget(self.folder / kind / name)

    def _fetch_file(self, name: str) -> Path:
        content = self.link.call("GET", f"/single/{name}")
        path = self.folder / name
        with _local_errors(str(path)):
            if not path.exists() or path.read_bytes() != content:
                write_atomically(path, content, private=True)
        return path

    def _fetch_folder(self, name: str, into: Path | None, deadline: float, *, weights: bool) -> Path:
        kind, number = name.split("/")
        final = into or fetched_path(self.folder, kind, number)
        listing = codec.from_json(FolderListing, self.link.call("GET", f"/files/{name}", timeout_s=_left(deadline)))
        if not weights:
            listing = FolderListing(files=tuple(file for file in listing.files if not file.name.endswith(_WEIGHTS)))
        final.parent.mkdir(exist_ok=True, parents=True)
        arriving = ArrivingFolder(final, listing, self.index)
        if missing := arriving.missing:
            _check_space(final.parent, min(arriving.missing_bytes, listing.size), name)
            self.expected |= frozenset(missing)
            try:
                sources, store = self._sources(name, deadline)
                if store:
                    self._fetch_stored(name, store, arriving, deadline)
                self._for_each(arriving.missing, lambda sha256: self._fetch_chunk(sha256, arriving, sources, deadline))
            finally:
                self.expected -= frozenset(missing)
        arriving.commit()
        return final

    def _sources(self, name: str, deadline: float) -> tuple[list[Link], str]:
        """Returns the mirrors that started before this one, and the URL of the object store if the store has the folder.

        A mirror or store that fails once during a transfer is not used again.
        """
        if self.relay is None:
            return [], ""
        sources: list[Link] = []
        joining = {"folder": name, "url": self.relay[0], "key": self.relay[1]}
        answer = self.link.json("POST", "/peers", joining, timeout_s=_left(deadline))  # with a store, the response arrives after the upload
        for peer in answer["mirrors"][:_PEERS]:
            with contextlib.suppress(UserError, ValueError):  # another host reported an invalid address
                sources.append(Link(str(peer["url"]), str(peer["key"]), what="a mirror", silence_s=_PEER_S))
        return sources, str(answer["store"])

    def _fetch_stored(self, name: str, url: str, arriving: ArrivingFolder, deadline: float) -> None:
        """Reads missing chunks from the object store. Chunks that are missing or damaged in the store, or that the store does not return,
        stay missing."""
        missing, per_piece = set(arriving.missing), PIECE // CHUNK
        pieces = [
            (file, first)
            for file in arriving.listing.files
            for first in range(0, len(file.chunks), per_piece)
            if missing.intersection(file.chunks[first : first + per_piece])
        ]

        def fetch(piece: tuple[FileChunks, int]) -> None:
            (one, first), chunks = piece, piece[0].chunks[piece[1] : piece[1] + per_piece]
            if time.monotonic() < deadline:
                data = store.read(f"{name}/{one.name}", first * CHUNK, min((first + per_piece) * CHUNK, one.size))
                for number, sha256 in enumerate(chunks):
                    arriving.write(sha256, data[number * CHUNK : (number + 1) * CHUNK])

        try:
            store = ObjectStore(url)
            self._for_each(pieces, fetch)
        except (InfrastructureError, UserError, ValueError) as error:
            log.warning("the rest of %s is fetched from the driver or from other hosts, not from the object store: %s", name, error)

    def _fetch_chunk(self, sha256: str, arriving: ArrivingFolder, sources: list[Link], deadline: float) -> None:
        for source in tuple(sources):
            try:
                status, data = source.request("GET", f"/chunks/{sha256}", timeout_s=min(_PEER_S, _left(deadline)), most=CHUNK)
                if status != 200:
                    raise LinkLost(f"{source.url} answered with status {status}")
                arriving.write(sha256, data)
                return
            except (HTTPException, LinkLost, ValueError, OSError) as error:
                if isinstance(error, OSError) and disk_full_error(error):
                    raise
                with contextlib.suppress(ValueError):  # another thread removed it
                    sources.remove(source)
        for tries in range(_TRIES):
            data = self.link.call("GET", f"/chunks/{sha256}", timeout_s=min(_CHUNK_S, _left(deadline)))
            try:
                arriving.write(sha256, data)
                return
            except ValueError as error:
                if tries == _TRIES - 1:
                    raise LinkLost(f"a chunk of {arriving.final.name} arrives damaged from {self.link.url}: {error}") from error

    def _for_each(self, chunks: Sequence[T], transfer: Callable[[T], None]) -> None:
        """Calls `transfer` for each chunk in order, a few at a time. If a call raises, starts no more calls, and raises the error when the
        running calls have finished."""
        left, lock, failed = iter(chunks), threading.Lock(), threading.Event()

        def work() -> None:
            while not failed.is_set():
                with lock:
                    chunk = next(left, None)
                if chunk is None:
                    return
                try:
                    transfer(chunk)
                except BaseException:
                    failed.set()
                    raise

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="mirror") as pool:
            working = [pool.submit(work) for _ in range(_THREADS)]
            wait(working, return_when=FIRST_EXCEPTION)
        for task in working:
            task.result()

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        """Locks the mirror for one transfer, because several parts on a host may need the same folder."""
        handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not wait_for_lock(handle, fcntl.LOCK_EX, within_s=timeout_s):
                raise InfrastructureError(
                    f"another process has used the mirror {self.folder} for {timeout_s:g} s\n  fix: wait for that process, or stop it"
                )
            yield
        finally:
            os.close(handle)


def _left(deadline: float) -> float:
    """Returns the seconds until a deadline. Raises `LinkLost` if the deadline has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise LinkLost("the transfer did not end in time")
    return left


def _check_space(folder: Path, needs: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if needs > free:
        raise DiskFull(f"no room for {name} in {folder}: {needs >> 20} MiB are needed, {free >> 20} MiB are free")


@contextmanager
def _local_errors(what: str) -> Iterator[None]:
    """Raises `DiskFull` if the disk is full, and `InfrastructureError` for any other disk error on this host."""
    try:
        yield
    except OSError as error:
        if disk_full_error(error) is not None:
            raise DiskFull(f"no room to write {what}") from error
        raise InfrastructureError(f"cannot read or write {what}: {error.strerror or error}") from error

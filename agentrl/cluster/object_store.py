"""Versions in an object store, from which hosts read them instead of from the driver (fsspec: `s3://`, `gs://`, `file://` and others).

    serving.weight_transfer={"ref": "file", "options": {"store": "s3://bucket/folder"}}

The driver uploads a version when the first host fetches it. A host fetches the checksums from the driver and checks every chunk. If chunks
are missing or damaged in the store, the host fetches them from the driver or from other hosts. The store therefore need not be trusted, and
its loss only slows transfers.

    FOLDER/RUN/versions/000012/model.safetensors     RUN is the id of the run
    FOLDER/RUN/versions/000012/.complete             checksum of the list of files, written last

The store's library reads credentials from the environment of the driver and of the hosts. Every call has a deadline, because these
libraries may retry indefinitely.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from agentrl.base.error_text import one_line_error
from agentrl.cluster.chunks import FolderListing
from agentrl.errors import InfrastructureError, UserError
from agentrl.records import codec

T = TypeVar("T")

OPTION = "serving.weight_transfer.options.store"
CHECK_S = 25.0
"""Deadline, in seconds, of the check before a run starts."""
UPLOAD_S = 1500.0
"""Deadline, in seconds, of the upload of one version."""
READ_S = 120.0
"""Deadline, in seconds, of one read of at most `PIECE` bytes."""
PIECE = 16 << 20
_CLEAN_S = 60.0
_MARK = ".complete"
_VERSION = re.compile(r"[0-9]{6,9}")


class ObjectStore:
    """The folder of one run in a store. Thread-safe.

    Every method except `check` raises `InfrastructureError` if the store fails or does not respond in time.
    """

    def __init__(self, url: str) -> None:
        """`url`: the URL of the store, including the run's id. Raises `UserError` if the store cannot be opened, for example because the
        package that fsspec needs for it is not installed."""
        self.url = url

        def open_store() -> tuple[Any, str]:
            fsspec: Any = import_module("fsspec")
            files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)  # some libraries log in here
            return files, root

        try:
            self._files, self._root = self._call(open_store, CHECK_S)
        except InfrastructureError as error:
            raise UserError(f"{OPTION}: {url} cannot be used: {one_line_error(error)}", fix="install its package on every node") from error

    def check(self) -> None:
        """Checks that the store works: writes, reads and deletes an object. Raises `UserError` if the check fails."""
        path, content = f"{self._root}/check-{secrets.token_hex(8)}", secrets.token_bytes(64)

        def check() -> bytes:
            self._write(path, content)
            read = self._files.cat_file(path)
            self._files.rm_file(path)
            return bytes(read)

        fix = "set the store's credentials in the environment of the driver and of every node, and check its quota"
        try:
            if self._call(check, CHECK_S) == content:
                return
        except InfrastructureError as error:
            raise UserError(f"{OPTION}: {error}", fix=fix) from error
        raise UserError(f"{OPTION}: {self.url} does not return what was written", fix=fix)

    def upload(self, name: str, folder: Path, listing: FolderListing) -> None:
        """Uploads a version (`versions/000012`), unless the store already contains it with these files. An interrupted upload starts from
        the beginning."""
        target, mark = f"{self._root}/{name}", hashlib.sha256(codec.to_json(listing)).hexdigest().encode()

        def upload() -> None:
            with contextlib.suppress(FileNotFoundError):
                if self._files.cat_file(f"{target}/{_MARK}") == mark:
                    return
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(target, recursive=True)
            for file in listing.files:
                self._make_parent(f"{target}/{file.name}")
                self._files.put_file(str(folder / file.name), f"{target}/{file.name}")
            self._write(f"{target}/{_MARK}", mark)

        self._call(upload, UPLOAD_S)

    def read(self, path: str, start: int, end: int) -> bytes:
        """Returns the bytes from `start` to `end` in a file (`versions/000012/model.safetensors`); fewer if the file is shorter."""
        return bytes(self._call(lambda: self._files.cat_file(f"{self._root}/{path}", start=start, end=end), READ_S))

    def drop_others(self, keep: Iterable[str]) -> None:
        """Deletes the versions whose folder name (`000012`) is not in `keep`."""
        wanted, parent = set(keep), f"{self._root}/versions"

        def drop() -> None:
            for path in self._files.ls(parent, detail=False):
                name = path.rstrip("/").rpartition("/")[2]
                if name not in wanted and _VERSION.fullmatch(name):  # other users may write to the store
                    self._files.rm(path, recursive=True)

        self._call(drop, _CLEAN_S)

    def remove(self) -> None:
        """Deletes all versions of the run."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._root, recursive=True)

        self._call(remove, _CLEAN_S)

    def _make_parent(self, path: str) -> None:
        if "file" in self._files.protocol:  # stores have no folders; in some, this would create a bucket
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _write(self, path: str, content: bytes) -> None:
        self._make_parent(path)
        self._files.pipe_file(path, content)

    def _call(self, function: Callable[[], T], seconds: float) -> T:
        """Runs a call in a thread and returns its result. Abandons the thread at the deadline."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=call, daemon=True, name="object store").start()
        try:
            return result.result(seconds)
        except TimeoutError as error:
            reason = one_line_error(error) if result.done() else f"no answer within {seconds:g} s"
            raise InfrastructureError(f"object store {self.url}: {reason}") from error
        except Exception as error:  # libraries of stores raise arbitrary errors
            raise InfrastructureError(f"object store {self.url}: {one_line_error(error)}") from error

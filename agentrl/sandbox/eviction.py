"""Images unused for long: the disk space they take, and their removal. An image that is needed again is built again.

An image lives in its folder of the cache and, for the Docker backend, as images of the daemon whose tags end in the folder's name.
Its last use is when a sandbox last got the exec server's file in its folder (`images.note_use`). Images of the daemon without a
folder in this cache are left alone: they may belong to another cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import requests
from docker.errors import APIError, DockerException

from agentrl.sandbox import docker, docker_client
from agentrl.sandbox.images import cache_folder

DAY_S = 86400.0
_KEY = re.compile(r"[0-9a-f]{16}")
_HALF_MADE = re.compile(r"rootfs\.[0-9]+|base\.[0-9]+\.tar")
"""What a build leaves when its process is killed; only considered while nothing is being built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedFile:
    """Something unused for `days`: `UnusedFile(what="agentrl/tables:0123456789abcdef", size=170_000_000, days=40.2)`."""

    name: str  # tag of an image of the daemon, or path below the cache
    size: int  # bytes; layers shared by several of the daemon's images are counted for each
    days: float


def evict(*, days: float, dry: bool) -> list[UnusedFile]:
    """Images and exec servers (of earlier versions) unused for `days`, and what killed builds left behind. Blocking.

    Removes them unless `dry`. Keeps what is being built and what a container still uses. Raises `SandboxError` when the daemon
    fails.
    """
    unused: list[UnusedFile] = []
    tags = _tags()
    folders = sorted(path for path in (cache_folder() / "images").glob("*") if path.is_dir() and _KEY.fullmatch(path.name))
    for folder in folders:
        with _nobody_builds(folder) as quiet:
            if quiet:
                unused += _evict(folder, tags.get(folder.name, {}), days, dry)
    return unused


def _evict(folder: Path, tags: dict[str, int], days: float, dry: bool) -> list[UnusedFile]:
    files = [path for path in sorted(folder.iterdir()) if path.suffix != ".lock"]
    half_made = {path for path in files if _HALF_MADE.fullmatch(path.name)}
    age = min((_age(path) for path in files if path not in half_made), default=float("inf"))
    doomed = files if age >= days else [path for path in files if path in half_made or _old_server(path, days)]
    unused = [UnusedFile(name=f"{folder.name}/{path.name}", size=_size(path), days=_age(path)) for path in doomed]
    if not dry:
        for path in doomed:
            _remove(path)
    if age >= days:
        gone = tags if dry else {tag: size for tag, size in tags.items() if _untag(tag)}
        unused += [UnusedFile(name=tag, size=size, days=age) for tag, size in sorted(gone.items())]
    return unused


def _old_server(path: Path, days: float) -> bool:
    return path.name.startswith("exec_server-") and _age(path) >= days


def _age(path: Path) -> float:
    """Days since a file was made or last used."""
    return (time.time() - path.lstat().st_mtime) / DAY_S


def _size(path: Path) -> int:
    inside = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(file.lstat().st_blocks * 512 for file in [path, *inside])


def _remove(path: Path) -> None:
    """A file tree is moved away first, so that a half-removed one is never taken for a complete one."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    aside = path.with_name(f"rootfs.{os.getpid()}") if path.name == "rootfs" else path
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _nobody_builds(folder: Path) -> Iterator[bool]:
    """Whether no process is building this image; none can start within the block."""
    with contextlib.ExitStack() as stack:
        for what in ("files", "docker", "build"):
            lock = stack.enter_context(open(folder / f"{what}.lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True


def _tags() -> dict[str, dict[str, int]]:
    """Image key -> tag -> size in bytes, of the daemon's images; empty without a daemon."""
    listed: list[dict[str, Any]] = docker.ask(
        lambda: docker.client(docker.REQUEST_S).images(filters={"reference": "agentrl/*"}), without=[]
    )
    sizes: dict[str, dict[str, int]] = {}
    for image in listed:
        for tag in image["RepoTags"] or ():
            sizes.setdefault(tag.rpartition(":")[2].partition("-")[0], {})[tag] = int(image["Size"])
    return sizes


def _untag(tag: str) -> bool:
    """Removes a tag, and the image with its last tag; False when a container uses it."""
    try:
        docker.client(docker.REQUEST_S).remove_image(tag)
    except APIError as error:
        if error.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
            raise docker_client.daemon_error(error) from error
        return bool(error.status_code == HTTPStatus.NOT_FOUND)
    except (DockerException, requests.RequestException) as error:
        raise docker_client.daemon_error(error) from error
    return True

"""Lists the open sandboxes on this machine, and removes unused images and what dead drivers left behind.

A killed driver leaves containers behind. Bubblewrap sandboxes stop with their driver; only their folders and control groups remain.
Each sandbox is labelled with the lease of its driver, which shows whether that driver is still running.

An image has a folder in the cache and, for the Docker backend, images in the daemon whose tags contain the folder's name. Opening a
sandbox records the use of its image (`images.record_use`). Images in the daemon that have no folder in this cache are kept, because a
different cache may use them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from docker.errors import APIError

from agentrl.sandbox import docker_client, limits
from agentrl.sandbox.images import cache_folder
from agentrl.sandbox.lease import alive, read_run_label, runtime_folder

_DAY_S = 86400.0
_KEY = re.compile(r"[0-9a-f]{16}")
_PART = re.compile(r"rootfs\.[0-9]+|base\.[0-9]+\.tar")  # left by a killed build; checked only while the image is not being built


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSandbox:
    """A sandbox on this machine, such as `OpenSandbox(name="agentrl-...-0", backend="docker", run="quickstart", driver_alive=False)`."""

    name: str
    backend: str  # "docker", "bubblewrap", or "container" for a container that several Docker sandboxes share
    run: str
    driver_alive: bool | None  # None: unknown, because the driver's pid namespace is different, such as a container's


def list_open() -> list[OpenSandbox]:
    """Returns every sandbox of this user's drivers, and every agentrl container of the local Docker daemon, also of drivers that have died.

    Raises `SandboxTimeout` if the Docker daemon does not respond, and `SandboxError` if it fails or the runtime folder is not private.
    """
    sandboxes: dict[str, OpenSandbox] = {}
    for driver in _subfolders(runtime_folder()):
        for folder in _subfolders(driver):
            backend, run = read_run_label(folder)
            sandboxes[folder.name] = OpenSandbox(name=folder.name, backend=backend, run=run, driver_alive=alive(driver.name))
    for name, labels in _containers().items():
        lease = labels.get(docker_client.LABEL_LEASE, "")
        backend = "container" if docker_client.LABEL_SHARED in labels else "docker"
        sandboxes[name] = OpenSandbox(name=name, backend=backend, run=labels.get(docker_client.LABEL_RUN, ""), driver_alive=alive(lease))
    return sorted(sandboxes.values(), key=lambda sandbox: sandbox.name)


def prune() -> int:
    """Removes the containers, folders and control groups of drivers that are known to be dead. Returns the number of
    removed sandboxes. Blocking.

    Raises the errors of `list_open`, and `SandboxError` if a process in a control group does not exit.
    """
    dead = {sandbox.name for sandbox in list_open() if sandbox.driver_alive is False}
    for name in dead & _containers().keys():
        docker_client.remove(name)
    for driver in _subfolders(runtime_folder()):
        if alive(driver.name) is False:
            shutil.rmtree(driver, ignore_errors=True)
    groups = limits.find_control_groups()
    if groups is not None:
        for name in groups.names():
            if alive(lease_in_name(name)) is False:
                groups.end(name)
                dead.add(name)
    return len(dead)


def lease_in_name(name: str) -> str:
    """Returns the lease in a sandbox's name (`agentrl-<lease>-<number>`)."""
    return name.removeprefix("agentrl-").rpartition("-")[0]


def _subfolders(folder: Path) -> list[Path]:
    """Returns the folders in `folder`. Empty if `folder` no longer exists: a driver's folder is removed with the driver's last sandbox."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _containers() -> dict[str, dict[str, str]]:
    return docker_client.containers(docker_client.LABEL_LEASE) if docker_client.reachable() else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedFile:
    """A file or image that was unused for `days` days, such as `UnusedFile(name="agentrl/tables:0123456789abcdef", size=170_000_000,
    days=40.2)`."""

    name: str  # tag of an image in the daemon, or path below `images` in the cache
    size: int  # bytes; layers that several images in the daemon share are counted for each image
    days: float


def evict(*, days: float, dry: bool) -> list[UnusedFile]:
    """Removes images and old exec servers that have been unused for at least `days` days, and partial files of killed builds. Blocking.

    Keeps images that are being built, and tags of images that a container uses. Returns what was removed. If `dry` is true, removes nothing
    and returns what would be removed. Raises `SandboxError` if the Docker daemon fails, and `OSError` if the cache cannot be changed.
    """
    unused: list[UnusedFile] = []
    tags = _tags()
    folders = sorted(path for path in (cache_folder() / "images").glob("*") if path.is_dir() and _KEY.fullmatch(path.name))
    for folder in folders:
        with _try_lock(folder) as is_locked:
            if is_locked:
                unused += _evict(folder, tags.get(folder.name, {}), days, dry)
    return unused


def _evict(folder: Path, tags: dict[str, int], days: float, dry: bool) -> list[UnusedFile]:
    ages = {path: (time.time() - path.lstat().st_mtime) / _DAY_S for path in sorted(folder.iterdir()) if path.suffix != ".lock"}
    parts = {path for path in ages if _PART.fullmatch(path.name)}
    age = min((own for path, own in ages.items() if path not in parts), default=float("inf"))
    old_servers = {path for path in ages if path.name.startswith("exec_server-") and ages[path] >= days}
    doomed = list(ages) if age >= days else [path for path in ages if path in parts | old_servers]
    unused = [UnusedFile(name=f"{folder.name}/{path.name}", size=_size(path), days=ages[path]) for path in doomed]
    if not dry:
        for path in doomed:
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            tree = path.with_name(f"rootfs.{os.getpid()}") if path.name == "rootfs" else path
            path.rename(tree)  # so that a half-removed tree is never mistaken for a complete one
            shutil.rmtree(tree, ignore_errors=True)
    if age >= days:
        removed = (_removable(tags) if tags else []) if dry else [tag for tag in tags if _untag(tag)]
        unused += [UnusedFile(name=tag, size=size, days=age) for tag, size in sorted(tags.items()) if tag in removed]
    return unused


def _size(path: Path) -> int:
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(file.lstat().st_blocks * 512 for file in [path, *files])


@contextlib.contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    """Prevents builds of an image during the block, and yields True. Yields False if a process is already building the image."""
    with contextlib.ExitStack() as stack:
        for name in ("files", "docker", "build"):
            lock = stack.enter_context(open(folder / f"{name}.lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True


def _tags() -> dict[str, dict[str, int]]:
    """Returns a mapping image key -> tag -> size in bytes, for the images in the daemon. Empty if there is no daemon."""
    sizes: dict[str, dict[str, int]] = {}
    if not docker_client.reachable():
        return sizes
    with docker_client.connection() as api:
        for image in api.images(filters={"reference": "agentrl/*"}):
            for tag in image["RepoTags"] or ():
                sizes.setdefault(tag.rpartition(":")[2].partition("-")[0], {})[tag] = int(image["Size"])
    return sizes


def _removable(tags: Iterable[str]) -> list[str]:
    """Returns the tags that `_untag` would remove, one after the other: all, except the last tag of an image that a container uses."""
    removable: list[str] = []
    with docker_client.connection() as api:
        used = {container["ImageID"] for container in api.containers(all=True)}
        for tag in tags:
            image = api.inspect_image(tag)
            if image["Id"] not in used or set(image["RepoTags"]) - {tag, *removable}:
                removable.append(tag)
    return removable


def _untag(tag: str) -> bool:
    """Removes a tag, and the image if this was its last tag. Returns False if a container uses the image."""
    with docker_client.connection() as api:
        try:
            api.remove_image(tag)
        except APIError as error:
            if error.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise
            return bool(error.status_code == HTTPStatus.NOT_FOUND)
    return True

"""Sandboxes made by a Docker daemon on this machine, one container each.

A container has no network, no new privileges, a read-only root, and limits on memory (swap included), processes, CPU time and
disk (tmpfs of limited size). Its main process, the exec server, starts as root with the few rights it needs to become another
user; the programs it runs are a third one, without any right. A filter of system calls comes on top of the daemon's own.

Two daemon calls open it; none is needed while it is used or when it ends: the exec server inside connects to a socket of ours
that is mounted into the container, so programs run without `docker exec`, and when we hang up it ends, the kernel ends the rest,
and the daemon removes the container. What does not go by itself is removed by force.

`NetworkDisabled` is what makes this cheap: the container still gets a network namespace of its own, with nothing in it, but the
daemon does not start a helper process to fill it. That halves the CPU time of a container. The runtime `crun` takes off more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.transport import UnixHTTPAdapter

from agentrl.errors import SandboxError, SandboxTimeout, SandboxUnavailable
from agentrl.records import SandboxSpec
from agentrl.sandbox import allowance, builds, egress, engine, images
from agentrl.sandbox.backend import MAX_OPENING, ChannelBackend, ReadyImage
from agentrl.sandbox.build_context import BuildContext
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.lease import lease, mark_folder, remove_folder, sandbox_folder, sandbox_name
from agentrl.sandbox.links import accept
from agentrl.sandbox.place import ChannelSandbox

T = TypeVar("T")
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys/fs/cgroup"]
"""The daemon's own list, and a tmpfs that anyone could write where a runtime mounts control groups (v1) on it."""
SHARING = ("", "crun", "runc")
"""Runtimes whose containers share the host's kernel, the daemon's own first."""
TERMINALS = {
    "Type": "volume",
    "Target": "/dev/pts",
    "VolumeOptions": {
        "NoCopy": True,
        "DriverConfig": {
            "Name": "local",
            "Options": {"type": "devpts", "device": "devpts", "o": f"nosuid,noexec,{allowance.TERMINAL_OPTIONS}"},
        },
    },
}
"""Pseudo terminals of the container's own, in place of the daemon's, which may be all that the machine has. It goes with the container."""
REQUEST_S = 60.0
QUICK_S = 15.0
"""For requests that only look or remove."""
PREPARE_S = 10.0
UNDO_S = 5.0
"""How long a failed opening waits for its own removal; it goes on behind the caller's back."""
POOLS = 2
"""Connections that each thread keeps: the library has one for each address it asks, and every container has its own addresses."""
PULL_S = 300.0
THREADS = MAX_OPENING
LOOK_S = 1.0
LEAVING_S = 10.0
SWEEP_AT = 64
STREAM_BYTES = 1 << 20


class DockerBackend(ChannelBackend):
    """Opens sandboxes as containers; see `SandboxBackend`. `run_label` marks them, and `agentrl sandbox ls` shows it."""

    name = "docker"

    def __init__(self, *, run_label: str, root: Path, progress: images.Progress = images.silent) -> None:
        super().__init__(run_label=run_label, root=root, progress=progress)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._undoing: set[asyncio.Task[None]] = set()  # openings that failed
        self._leaving: dict[str, float] = {}  # containers the daemon is to remove by itself -> since when

    async def _close(self) -> None:
        """See `close`; besides, removes by force what the daemon does not remove by itself."""
        try:
            await super()._close()
            if self._undoing:
                await asyncio.wait(self._undoing, timeout=QUICK_S)
            if self._leaving:
                names = frozenset(self._leaving)
                await self._call(lambda: _await_removed(names, LEAVING_S))
                self._leaving.clear()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ensure(self, image: images.Image) -> str:
        """Finds the image in the daemon, pulls it where its recipe names a registry reference, or builds and imports it."""
        return await asyncio.to_thread(ensure_image, image, self._progress)

    async def _start(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        name = sandbox_name()
        async with sandbox_folder(name) as folder, contextlib.AsyncExitStack() as undo:
            door = egress.Door.where_wanted(name, spec, folder)
            if door is not None:
                undo.callback(door.abandon)
            reader, writer = await self._connect(spec, image, name, folder)
            undo.pop_all()

        async def destroy(ended: bool) -> None:
            self._open.pop(name, None)
            if door is not None:
                await door.close()
            await asyncio.to_thread(remove_folder, folder)
            if ended:
                await self._leave(name)
            else:
                await self._discard(name)

        channel = Channel(reader, writer, name=name)
        return await self._greeted(ChannelSandbox(name, spec, channel, destroy), channel, door)

    async def _connect(self, spec: SandboxSpec, image: ReadyImage, name: str, folder: Path) -> Connection:
        """Creates the container and takes the connection of its exec server: the first one, before any other program runs there."""
        folder.chmod(0o711)  # the user inside must reach the socket; the folders above are this user's alone
        mark_folder(folder, self.name, self.run_label)
        server = folder / f"exec_server{image.server.suffix}"
        shutil.copyfile(image.server, server)
        server.chmod(0o644)
        with _listening(folder / "link") as listener:
            starting = asyncio.ensure_future(self._call(lambda: _create_and_start(name, self._container(name, spec, image, folder))))
            try:
                await asyncio.shield(starting)
                return await asyncio.open_unix_connection(sock=await self._first_of(listener, name), limit=STREAM_BYTES)
            except BaseException:
                await self._give_up(starting, name)
                raise

    async def _first_of(self, listener: socket.socket, name: str) -> socket.socket:
        """The exec server's connection; `SandboxError` as soon as its container has ended without one. The caller bounds the wait."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    return await accept(listener)
            if not await self._call(lambda: _runs(name)):
                raise SandboxError(f"container {name} ended before its exec server answered; does its image hold python3 (3.9 or later)?")

    async def _give_up(self, starting: asyncio.Future[None], name: str) -> None:
        """Has a container removed whose opening failed, and waits a moment for that."""
        self._leaving[name] = time.monotonic()  # found again by close() should what follows fail
        undoing = asyncio.create_task(self._undo(starting, name), name=f"undo {name}")
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)
        await asyncio.wait([undoing], timeout=UNDO_S)

    async def _undo(self, starting: asyncio.Future[None], name: str) -> None:
        """Removes a container whose opening failed, once the daemon has answered; close() looks again for what stays."""
        with contextlib.suppress(SandboxError):
            await starting
        with contextlib.suppress(SandboxError):
            await self._discard(name)

    async def _leave(self, name: str) -> None:
        """Leaves the removal to the daemon, and now and then removes by force what it should have removed long ago."""
        now = time.monotonic()
        self._leaving[name] = now
        if len(self._leaving) >= SWEEP_AT:
            due = frozenset(other for other, since in self._leaving.items() if since < now - LEAVING_S)
            for other in due:
                del self._leaving[other]
            if due:
                await self._call(lambda: _await_removed(due, 0.0))

    async def _discard(self, name: str) -> None:
        await asyncio.shield(self._call(lambda: remove(name)))
        self._leaving.pop(name, None)

    async def _call(self, work: Callable[[], T]) -> T:
        """Runs a blocking daemon call in the bounded pool, with daemon errors as `SandboxError`."""
        try:
            async with asyncio.timeout(REQUEST_S + 5):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise SandboxTimeout(f"the Docker daemon gave no answer in {REQUEST_S:.0f} s") from None
        except (DockerException, requests.RequestException) as error:
            raise engine.fault(error) from error

    def _container(self, name: str, spec: SandboxSpec, image: ReadyImage, folder: Path) -> dict[str, Any]:
        """The body of the daemon's create request."""
        options = allowance.server_options(name, spec)
        mounts = {"/agentrl": folder, **allowance.describe(folder, options)}
        shared = spec.runtime in SHARING
        if not shared:  # one with a kernel of its own shows that kernel's cores, and has terminals and buffers for itself
            del mounts[allowance.CORES_FILE]
        binds = [{"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": True} for target, source in mounts.items()]
        host = {
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "CapAdd": ["SETPCAP", *allowance.server_rights()],
            "SecurityOpt": ["no-new-privileges"],
            "ReadonlyRootfs": True,
            "Tmpfs": {
                "/home/agent": _tmpfs(spec, allowance.disk_bytes(spec)),
                "/tmp": _tmpfs(spec, allowance.disk_bytes(spec)),
                "/dev/shm": _tmpfs(spec, allowance.shared_memory_bytes(spec)),
            },
            "Memory": spec.memory_mb << 20,
            "MemorySwap": spec.memory_mb << 20,
            "KernelMemoryTCP": allowance.socket_bytes(spec),  # v1 counts it apart from memory
            "PidsLimit": spec.processes + 1,  # the exec server
            "NanoCpus": int(spec.cpus * 1e9),
            "LogConfig": {"Type": "none", "Config": {}},
            "Mounts": [*binds, *([TERMINALS] if shared else [])],
            "Sysctls": allowance.NETWORK_SETTINGS if shared else {},
            "AutoRemove": True,
            "IpcMode": "none",  # a namespace of its own; /dev/shm is mounted above, with a bound on its files
            "CgroupnsMode": "private",
            "ReadonlyPaths": READ_ONLY,
        }
        if spec.runtime:
            host["Runtime"] = spec.runtime
        return {
            "Image": image.tree,
            "Entrypoint": ["python3", "-I", image.server_inside, "connect:/agentrl/link", json.dumps(options)],
            "User": "0:0",
            "Env": ["LANG=C.UTF-8"],
            "WorkingDir": "/",
            "Hostname": "sandbox",
            "NetworkDisabled": True,
            "Labels": {engine.LABEL_RUN: self.run_label, engine.LABEL_LEASE: lease()},
            "HostConfig": host,
        }


def ensure_image(image: images.Image, progress: images.Progress = images.silent) -> str:
    """The image's tag, after making sure that the daemon has it. Blocking; may take minutes the first time."""
    if engine.state(PREPARE_S) == "silent":
        raise engine.silence()
    api = client()
    try:
        if builds.has(api, image.tag):
            return image.tag
        with images.locked(image, "docker"):
            if not builds.has(api, image.tag) and not _made(api, image, progress):
                tarball = images.ensure_tarball(image, progress)
                progress(f"importing sandbox image {image.name} into Docker")
                _import(api, tarball, image.tag)
    except (DockerException, requests.RequestException) as error:
        raise engine.fault(error) from error
    return image.tag


def client(patience_s: float = REQUEST_S) -> docker.APIClient:
    """This thread's own connection to the daemon: the library's clients are not safe to share between threads."""
    if getattr(_local, "address", "") != engine.address():
        api = docker.APIClient(base_url=engine.address(), version=engine.API_VERSION, timeout=REQUEST_S)
        # Its `num_pools` goes unheard for local sockets (docker 7.2), hence the adapter of our own.
        api.mount("http+docker://", UnixHTTPAdapter(engine.address().removeprefix("unix://"), REQUEST_S, pool_connections=POOLS))
        _local.api, _local.address = api, engine.address()
    _local.api.timeout = patience_s
    return _local.api


_local = threading.local()


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A socket at `path` to which whoever sees it may connect; gone after the block."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        try:
            path.chmod(0o666)
            listener.listen(1)
            listener.setblocking(False)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _tmpfs(spec: SandboxSpec, size: int) -> str:
    return f"rw,nosuid,nodev,exec,mode=1777,size={size},nr_inodes={allowance.inodes(spec)}"


# What follows blocks, and runs in the backend's threads ---------------------------------------------------------------


def _create_and_start(name: str, container: dict[str, Any]) -> None:
    api = client()
    api.create_container_from_config(container, name=name)
    api.start(name)


def _runs(name: str) -> bool:
    try:
        return bool(client(QUICK_S).inspect_container(name)["State"]["Running"])
    except NotFound:
        return False


def remove(name: str) -> None:
    """Kills and removes a container; one that is gone, or on its way, is as good."""
    try:
        client(QUICK_S).remove_container(name, force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != HTTPStatus.CONFLICT:
            raise


def _await_removed(names: frozenset[str], timeout_s: float) -> None:
    """Gives the daemon `timeout_s` to remove the containers `names` of this process by itself, then removes the rest by force."""
    deadline = time.monotonic() + timeout_s
    while left := names & containers(f"{engine.LABEL_LEASE}={lease()}").keys():
        if time.monotonic() >= deadline:
            for name in left:
                remove(name)
            return
        time.sleep(0.1)


def ask(question: Callable[[], T], *, without: T) -> T:
    """What `question`, put to the local daemon, gives; `without` where there is none, or one on another machine, which we never use.

    Raises `SandboxTimeout` when the daemon is there and does not answer, `SandboxError` when it misbehaves.
    """
    try:
        state = engine.state()
    except SandboxUnavailable:
        return without
    if state == "absent":
        return without
    if state == "silent":
        raise engine.silence()
    try:
        return question()
    except (DockerException, requests.RequestException) as error:
        raise engine.fault(error) from error


def containers(label: str) -> dict[str, dict[str, str]]:
    """Name -> labels of every container, running or not, that carries `label` (`key` or `key=value`)."""
    found = client(QUICK_S).containers(all=True, filters={"label": [label]})
    return {item["Names"][0].lstrip("/"): item["Labels"] for item in found if item["Names"]}


def _made(api: docker.APIClient, image: images.Image, progress: images.Progress) -> bool:
    """Tags the image that the daemon has built or pulled; False when its file tree must be imported instead."""
    if isinstance(image.recipe, BuildContext):
        images.ensure_built(image, progress)
        if builds.plain(image.built):
            api.tag(image.built, *image.tag.split(":"))
            return True
        return False
    return bool(image.recipe.pull) and _pulled(api, image, image.recipe.pull, progress)


def _pulled(api: docker.APIClient, image: images.Image, reference: str, progress: images.Progress) -> bool:
    """Tries the registry; False when it does not answer or has no such image, which is no fault: the image is built instead."""
    progress(f"pulling {reference} for sandbox image {image.name}")
    puller = docker.APIClient(base_url=engine.address(), version=engine.API_VERSION, timeout=PULL_S)
    try:
        puller.pull(reference)
        builds.check_python(api, reference, f"image.toml of {image.name}: pull: {reference}")
        api.tag(reference, *image.tag.split(":"))
    except (APIError, requests.RequestException) as error:
        progress(f"{reference} cannot be pulled ({str(error)[:120]}); building instead")
        return False
    finally:
        puller.close()
    return True


def _import(api: docker.APIClient, tarball: Path, tag: str) -> None:
    repository, version = tag.split(":")
    answer = api.import_image_from_file(str(tarball), repository=repository, tag=version)
    for line in str(answer).splitlines():
        if line.startswith("{") and "error" in (said := json.loads(line)):
            raise SandboxError(f"docker import of {tarball} failed: {said['error']}")

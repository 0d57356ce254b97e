"""Sandboxes made by a Docker daemon on this machine: several to a container (`agentrl.sandbox.shared_containers`), or a container for each.

A container has no network, no new privileges, a read-only root, and limits on memory (swap included), processes and, where it is one
sandbox's own, CPU time and disk (tmpfs of limited size). Two daemon calls start it; none is needed while it is used or when it ends:
process 1 inside connects to a socket of ours that is mounted into the container, so programs run without `docker exec`, and when we hang
up it ends, the kernel ends the rest, and the daemon removes the container. What does not go by itself is removed by force.

In a container of its own a sandbox's exec server is process 1. It starts as root with the few rights it needs to become another user; the
programs it runs are a third one, without any right. A filter of system calls comes on top of the daemon's own. In a shared one process 1
is a keeper, which makes sandboxes with all that besides namespaces, a control group and a file tree for each.

`NetworkDisabled` makes containers cheaper: one still gets a network namespace of its own, with nothing in it, but the daemon does not
start a helper process to fill it. That halves the CPU time of a container. The runtime `crun` takes off more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
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
from agentrl.sandbox import builds, docker_client, egress, images, limits, shared_containers
from agentrl.sandbox.backend import MAX_OPENING, ChannelBackend, ReadyImage
from agentrl.sandbox.build_context import BuildContext
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.inside.keeper import EGRESS_FD
from agentrl.sandbox.inside.room import NAMESPACES, PERIOD_US
from agentrl.sandbox.lease import lease, remove_folder, runtime_folder, sandbox_folder, sandbox_name, write_run_label
from agentrl.sandbox.links import accept
from agentrl.sandbox.processes import SandboxProcesses
from agentrl.sandbox.shared_containers import CannotShare, Container, ContainerPool, KeeperClient, SharedSandbox

log = logging.getLogger(__name__)

T = TypeVar("T")

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
            "Options": {"type": "devpts", "device": "devpts", "o": f"nosuid,noexec,{limits.TERMINAL_OPTIONS}"},
        },
    },
}
"""Pseudo terminals of the container's own, in place of the daemon's, which may be all that the machine has. It goes with the container."""
HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"
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
PATIENCE_S = 1.0
"""How long a sandbox that has hung up may take to be gone before it is killed."""
SWEEP_AT = 64
STREAM_BYTES = 1 << 20


class NeverAnswered(SandboxError):
    """A container has ended without a word."""


class DockerBackend(ChannelBackend):
    """Opens sandboxes as containers; see `SandboxBackend`. `run_label` marks them, and `agentrl sandbox ls` shows it."""

    name = "docker"

    def __init__(self, *, run_label: str, root: Path, progress: images.Progress = images.no_progress) -> None:
        super().__init__(run_label=run_label, root=root, progress=progress)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._undoing: set[asyncio.Task[None]] = set()  # openings that failed, and shared containers that are ended
        self._shared = ContainerPool(self._stop)
        self._has_shared = False  # a sandbox has opened in a shared container
        self._alone = ""  # why none can be
        self._leaving: dict[str, float] = {}  # containers the daemon is to remove by itself -> since when

    async def _close(self) -> None:
        """See `close`; besides, removes by force what the daemon does not remove by itself."""
        try:
            await super()._close()
            self._shared.close()
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
        """In a container with others, unless the spec names a runtime, the image is not of packages alone, or containers here cannot.

        What starts sandboxes in a shared container has rights there that nothing has in a sandbox's own, and is run by the image's python3.
        So that comes from a distribution's packages, and not out of a Dockerfile that came with a task.
        """
        if image.from_packages and not spec.runtime and not self._alone:
            try:
                return await self._start_shared(spec, image)
            except SandboxError as error:
                if self._has_shared or not (self._alone or isinstance(error, CannotShare | NeverAnswered)):
                    raise
                if not self._alone:  # else another has found that out, and taken this one's container with it
                    self._alone = str(error)
                    self._shared.close()
                    log.warning("containers of this daemon cannot be shared, so each sandbox gets its own, which costs more: %s", error)
        return await self._start_alone(spec, image)

    # A container for each sandbox --------------------------------------------------------------------------------------

    async def _start_alone(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        name = sandbox_name()
        async with sandbox_folder(name) as folder, contextlib.AsyncExitStack() as undo:
            write_run_label(folder, self.name, self.run_label)
            listener = egress.EgressListener.for_spec(name, spec, folder)
            if listener is not None:
                undo.callback(listener.discard)
            options = limits.server_options(name, spec)
            link = await self._connect(name, self._container(spec, image, folder, options), folder, image.program)
            reader, writer = await asyncio.open_unix_connection(sock=link, limit=STREAM_BYTES)
            undo.pop_all()

        async def destroy(ended: bool) -> None:
            self._open.pop(name, None)
            if listener is not None:
                await listener.close()
            await asyncio.to_thread(remove_folder, folder)
            if ended:
                await self._leave(name)
            else:
                await self._discard(name)

        channel = Channel(reader, writer, name=name, relieve=SandboxProcesses.from_options(options, 0).kill_programs)
        return await self._greeted(ChannelSandbox(name, spec, channel, destroy), channel, listener)

    # A container for several sandboxes ---------------------------------------------------------------------------------

    async def _start_shared(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        """Raises `CannotShare` when the first sandbox of all meets something that no other would be spared."""
        name = sandbox_name()
        async with sandbox_folder(name) as folder, contextlib.AsyncExitStack() as undo:
            write_run_label(folder, self.name, self.run_label)
            listener = egress.EgressListener.for_spec(name, spec, folder)
            if listener is not None:
                undo.callback(listener.discard)
            container = await self._shared.acquire((image.tree, image.server, spec), lambda: self._new_container(spec, image))
            undo.callback(self._shared.release, container)
            keeper = container.starting.result()
            ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)
                reader, writer = await asyncio.open_unix_connection(sock=ours, limit=STREAM_BYTES)  # closes `ours` when it fails
                undo.callback(writer.close)
                described = self._room(name, spec)
                room = _hand_over(keeper, described, theirs, folder / egress.LINK if listener else None, image.replacement)
            undo.pop_all()

        async def destroy(ended: bool) -> None:
            self._open.pop(name, None)
            if listener is not None:
                await listener.close()
            try:
                await keeper.end(room, PATIENCE_S if ended else 0.0)
            finally:
                self._shared.release(container)
                await asyncio.to_thread(remove_folder, folder)

        channel = Channel(reader, writer, name=name, relieve=SandboxProcesses.from_options(described["options"], 0).kill_programs)
        try:
            sandbox = await self._greeted(ChannelSandbox(name, spec, channel, destroy), channel, listener)
        except SandboxError as error:
            if room.refused and not self._has_shared:
                raise CannotShare(room.failure) from None
            if room.failure:
                raise SandboxError(f"{error}; {room.failure}") from None
            raise
        self._has_shared = True
        return sandbox

    def _new_container(self, spec: SandboxSpec, image: ReadyImage) -> Container:
        name = sandbox_name()
        return Container(name, self._start_keeper(name, spec, image))

    async def _start_keeper(self, name: str, spec: SandboxSpec, image: ReadyImage) -> KeeperClient:
        async with sandbox_folder(name) as folder, asyncio.timeout(REQUEST_S):
            write_run_label(folder, "container", self.run_label)
            link = await self._connect(name, self._shared_container(name, spec, image, folder), folder, image.server, socket.SOCK_SEQPACKET)
            keeper = KeeperClient(link, name)
            try:
                await keeper.ready()
            except BaseException:
                keeper.close()
                await self._discard(name)
                raise
        return keeper

    def _stop(self, container: Container) -> None:
        """Ends a shared container, behind the caller's back; close() waits for it."""
        self._behind(self._end_container(container), f"end {container.name}")

    async def _end_container(self, container: Container) -> None:
        container.starting.cancel()  # nothing happens when it has started
        await asyncio.wait([container.starting])
        if not container.starting.cancelled() and container.starting.exception() is None:
            container.starting.result().close()
            await asyncio.to_thread(remove_folder, runtime_folder() / lease() / container.name)
            await self._leave(container.name)

    def _behind(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)
        return task

    # What goes through the daemon --------------------------------------------------------------------------------------

    async def _connect(
        self, name: str, container: dict[str, Any], folder: Path, program: Path, kind: socket.SocketKind = socket.SOCK_STREAM
    ) -> socket.socket:
        """Creates the container and takes its exec server's or keeper's connection: the first one, before any other program runs there."""
        folder.chmod(0o711)  # the user inside must reach the socket; the folders above are this user's alone
        server = folder / f"exec_server{program.suffix}"
        shutil.copyfile(program, server)
        server.chmod(0o644)
        with _listening(folder / "link", kind) as listener:
            starting = asyncio.ensure_future(self._call(lambda: _create_and_start(name, container)))
            try:
                await asyncio.shield(starting)
                return await self._first_of(listener, name)
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
                raise NeverAnswered(f"container {name} ended before its exec server answered; does its image hold python3 (3.9 or later)?")

    async def _give_up(self, starting: asyncio.Future[None], name: str) -> None:
        """Has a container removed whose opening failed, and waits a moment for that."""
        self._leaving[name] = time.monotonic()  # found again by close() should what follows fail
        await asyncio.wait([self._behind(self._undo(starting, name), f"undo {name}")], timeout=UNDO_S)

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
            raise docker_client.daemon_error(error) from error

    def _container(self, spec: SandboxSpec, image: ReadyImage, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """The body of the daemon's create request. `options` are the exec server's."""
        mounts = {"/agentrl": folder, **limits.write_system_files(folder, options)}
        shared_containers = spec.runtime in SHARING
        if not shared_containers:  # one with a kernel of its own shows that kernel's cores, and has terminals and buffers for itself
            del mounts[limits.CORES_FILE]
        binds = [{"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": True} for target, source in mounts.items()]
        host = {
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "CapAdd": ["SETPCAP", *limits.server_capabilities()],
            "SecurityOpt": ["no-new-privileges"],
            "ReadonlyRootfs": True,
            "Tmpfs": {
                "/home/agent": _tmpfs(spec, limits.disk_bytes(spec)),
                "/tmp": _tmpfs(spec, limits.disk_bytes(spec)),
                "/dev/shm": _tmpfs(spec, limits.shared_memory_bytes(spec)),
            },
            "Memory": spec.memory_mb << 20,
            "MemorySwap": spec.memory_mb << 20,
            "KernelMemoryTCP": limits.socket_bytes(spec),  # v1 counts it apart from memory
            "PidsLimit": spec.processes + 1,  # the exec server
            "NanoCpus": int(spec.cpus * 1e9),
            "LogConfig": {"Type": "none", "Config": {}},
            "Mounts": [*binds, *([TERMINALS] if shared_containers else [])],
            "Sysctls": limits.NETWORK_SETTINGS if shared_containers else {},
            "AutoRemove": True,
            "IpcMode": "none",  # a namespace of its own; /dev/shm is mounted above, with a bound on its files
            "CgroupnsMode": "private",
            "ReadonlyPaths": READ_ONLY,
        }
        if spec.runtime:
            host["Runtime"] = spec.runtime
        command = [image.program_path, "connect:/agentrl/link", json.dumps(options)]
        return self._labelled({"Image": image.tree, "Entrypoint": ["python3", "-I", *command], "HostConfig": host})

    def _shared_container(self, name: str, spec: SandboxSpec, image: ReadyImage, folder: Path) -> dict[str, Any]:
        """The same for a container that sandboxes with this spec share: wide enough for all of them, each of which has its own bounds.

        Its keeper may make namespaces and mounts, and what it starts gives that up before it runs anybody's program.
        """
        memory = shared_containers.SLOTS * (spec.memory_mb << 20) + shared_containers.KEEPER_BYTES
        host = {
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "CapAdd": ["SETPCAP", "SYS_ADMIN", "SYS_CHROOT", "NET_ADMIN", "MKNOD", *limits.server_capabilities()],
            "SecurityOpt": ["no-new-privileges", "apparmor=unconfined"],  # its usual profile allows no mount, whatever the rights
            "ReadonlyRootfs": True,
            "Tmpfs": dict.fromkeys(("/tmp", "/home/agent"), "rw,nosuid,nodev,noexec,mode=755,size=65536"),
            "Memory": memory,
            "MemorySwap": memory,
            "KernelMemoryTCP": shared_containers.SLOTS * limits.socket_bytes(spec),
            "PidsLimit": shared_containers.SLOTS * (spec.processes + 1) + 1,
            "LogConfig": {"Type": "none", "Config": {}},
            "Mounts": [{"Type": "bind", "Source": str(folder), "Target": "/agentrl", "ReadOnly": True}],
            "AutoRemove": True,
            "IpcMode": "none",
            "CgroupnsMode": "private",
        }
        command = [f"/agentrl/exec_server{image.server.suffix}", "keep:/agentrl/link"]
        container = self._labelled({"Image": image.tree, "Entrypoint": ["python3", "-I", *command], "HostConfig": host})
        return {**container, "Labels": {**container["Labels"], docker_client.LABEL_SHARED: "yes"}}

    def _labelled(self, container: dict[str, Any]) -> dict[str, Any]:
        """With what all containers of ours have."""
        return {
            "User": "0:0",
            "Env": ["LANG=C.UTF-8"],
            "WorkingDir": "/",
            "Hostname": "sandbox",
            "NetworkDisabled": True,
            "Labels": {docker_client.LABEL_RUN: self.run_label, docker_client.LABEL_LEASE: lease()},
            **container,
        }

    def _room(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        """What a keeper is told of one sandbox (see `agentrl.sandbox.inside.room`)."""
        options = limits.server_options(name, spec)
        if spec.network:
            options["network"] = {**options["network"], "link": f"fd:{EGRESS_FD}"}
        sizes = dict.fromkeys(limits.WRITABLE_FOLDERS, limits.disk_bytes(spec)) | {"/dev/shm": limits.shared_memory_bytes(spec)}
        return {
            "name": name,
            "options": options,
            "bounds": {
                "memory": spec.memory_mb << 20,
                "processes": spec.processes + 1,  # the exec server
                "cpu_us": int(spec.cpus * PERIOD_US),
                "sockets": limits.socket_bytes(spec),
            },
            "namespaces": list(NAMESPACES),
            "files": {**limits.system_files(options), "/etc/hosts": HOSTS, "/etc/hostname": "sandbox\n"},
            "terminals": limits.TERMINAL_OPTIONS,
            "settings": limits.NETWORK_SETTINGS,
            "tmpfs": {path: f"mode=1777,size={size},nr_inodes={limits.max_inodes(spec)}" for path, size in sizes.items()},
        }


def ensure_image(image: images.Image, progress: images.Progress = images.no_progress) -> str:
    """The image's tag, after making sure that the daemon has it. Blocking; may take minutes the first time."""
    if docker_client.daemon_state(PREPARE_S) == "silent":
        raise docker_client.silent_daemon_error()
    api = client()
    try:
        if builds.has_image(api, image.tag):
            return image.tag
        with images.locked(image, "docker"):
            if not builds.has_image(api, image.tag) and not _made(api, image, progress):
                tarball = images.ensure_tarball(image, progress)
                progress(f"importing sandbox image {image.name} into Docker")
                _import(api, tarball, image.tag)
    except (DockerException, requests.RequestException) as error:
        raise docker_client.daemon_error(error) from error
    return image.tag


def client(patience_s: float = REQUEST_S) -> docker.APIClient:
    """This thread's own connection to the daemon: the library's clients are not safe to share between threads."""
    if getattr(_local, "address", "") != docker_client.daemon_address():
        api = docker.APIClient(base_url=docker_client.daemon_address(), version=docker_client.API_VERSION, timeout=REQUEST_S)
        # Its `num_pools` goes unheard for local sockets (docker 7.2), hence the adapter of our own.
        api.mount(
            "http+docker://", UnixHTTPAdapter(docker_client.daemon_address().removeprefix("unix://"), REQUEST_S, pool_connections=POOLS)
        )
        _local.api, _local.address = api, docker_client.daemon_address()
    _local.api.timeout = patience_s
    return _local.api


_local = threading.local()


@contextlib.contextmanager
def _listening(path: Path, kind: socket.SocketKind) -> Iterator[socket.socket]:
    """A socket at `path` to which whoever sees it may connect; gone after the block."""
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(path))
        try:
            path.chmod(0o666)
            listener.listen(1)
            listener.setblocking(False)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _hand_over(
    keeper: KeeperClient, room: dict[str, Any], link: socket.socket, listener: Path | None, instead: Path | None
) -> SharedSandbox:
    """Has `keeper` make a sandbox with these descriptors: its connection, to whom it hands its listener, an exec server of another kind."""
    with contextlib.ExitStack() as stack:
        handed = {"link": link.fileno()}
        if listener is not None:
            egress_link = stack.enter_context(socket.socket(socket.AF_UNIX))
            egress_link.connect(str(listener))
            handed["egress"] = egress_link.fileno()
        if instead is not None:
            handed["program"] = stack.enter_context(open(instead, "rb")).fileno()
        return keeper.open(room, handed)


def _tmpfs(spec: SandboxSpec, size: int) -> str:
    return f"rw,nosuid,nodev,exec,mode=1777,size={size},nr_inodes={limits.max_inodes(spec)}"


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
    while left := names & containers(f"{docker_client.LABEL_LEASE}={lease()}").keys():
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
        state = docker_client.daemon_state()
    except SandboxUnavailable:
        return without
    if state == "absent":
        return without
    if state == "silent":
        raise docker_client.silent_daemon_error()
    try:
        return question()
    except (DockerException, requests.RequestException) as error:
        raise docker_client.daemon_error(error) from error


def containers(label: str) -> dict[str, dict[str, str]]:
    """Name -> labels of every container, running or not, that carries `label` (`key` or `key=value`)."""
    found = client(QUICK_S).containers(all=True, filters={"label": [label]})
    return {item["Names"][0].lstrip("/"): item["Labels"] for item in found if item["Names"]}


def _made(api: docker.APIClient, image: images.Image, progress: images.Progress) -> bool:
    """Tags the image that the daemon has built or pulled; False when its file tree must be imported instead."""
    if isinstance(image.recipe, BuildContext):
        images.ensure_built(image, progress)
        if builds.usable_as_is(image.built_tag):
            api.tag(image.built_tag, *image.tag.split(":"))
            return True
        return False
    return bool(image.recipe.pull) and _pulled(api, image, image.recipe.pull, progress)


def _pulled(api: docker.APIClient, image: images.Image, reference: str, progress: images.Progress) -> bool:
    """Tries the registry; False when it does not answer or has no such image, which is no fault: the image is built instead."""
    progress(f"pulling {reference} for sandbox image {image.name}")
    puller = docker.APIClient(base_url=docker_client.daemon_address(), version=docker_client.API_VERSION, timeout=PULL_S)
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

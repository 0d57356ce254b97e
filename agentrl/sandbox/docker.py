"""Sandboxes in containers of this machine's Docker daemon: one sandbox or several sandboxes per container
(`agentrl.sandbox.shared_containers`).

Starting a container takes two calls to the daemon; using the container takes none. Process 1 of the container connects to a socket that is
mounted into it. When the driver closes the connection, process 1 exits, the kernel kills all other processes, and the daemon removes the
container. Containers that remain are removed by force. In a container with one sandbox, process 1 is the exec server; in a shared container
it is a keeper, which creates the sandboxes.

`NetworkDisabled` halves the CPU time that a container costs, because its network namespace then stays empty without a helper process of
the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.records import SandboxSpec
from agentrl.sandbox import docker_client, egress, images, limits, shared_containers
from agentrl.sandbox.backend import MAX_OPENING, ChannelBackend, ReadyImage
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.inside.isolation import NAMESPACES
from agentrl.sandbox.inside.keeper import EGRESS_FD
from agentrl.sandbox.lease import lease, remove_folder, runtime_folder, sandbox_folder, write_run_label
from agentrl.sandbox.processes import SandboxProcesses
from agentrl.sandbox.shared_containers import CannotShare, Container, ContainerPool, KeeperClient, SharedSandbox
from agentrl.sandbox.waiting import accept, listen_at, spawn

log = logging.getLogger(__name__)

T = TypeVar("T")

SHARING = ("", "crun", "runc")
"""Runtimes whose containers share the host's kernel. The empty name is the daemon's default runtime."""
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
"""Pseudo terminals for one container. They replace the daemon's, which may use up the machine's, and are removed with the container."""
UNDO_S = 5.0
"""How long a failed opening waits for its clean-up. After that, the clean-up continues in the background."""
LOOK_S = 1.0
LEAVING_S = 10.0
PATIENCE_S = 1.0
"""How long a sandbox may take to exit after its connection is closed. After that, it is killed."""
_SWEEP_AT = 64
_STREAM_BYTES = 1 << 20
_READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys/fs/cgroup"]
"""The daemon's own list, plus /sys/fs/cgroup, a tmpfs that any user could write to if a runtime mounts version 1 control groups on it."""
_HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"


class NeverAnswered(SandboxError):
    """A container exited before it connected."""


class DockerBackend(ChannelBackend):
    """Opens sandboxes in containers. See `SandboxBackend` and `ChannelBackend`."""

    name = "docker"

    def __init__(self, *, run_label: str, root: Path, progress: images.Progress = images.no_progress) -> None:
        super().__init__(run_label=run_label, root=root, progress=progress)
        self._threads = ThreadPoolExecutor(MAX_OPENING, thread_name_prefix="docker")
        self._background: set[asyncio.Task[None]] = set()  # clean-up of failed openings and of shared containers
        self._shared = ContainerPool(self._stop)
        self._has_shared = False  # whether a sandbox has opened in a shared container
        self._sharing_problem = ""  # why sandboxes cannot share containers here
        self._leaving: dict[str, float] = {}  # containers that the daemon should be removing -> since when

    async def _close(self) -> None:
        try:
            await super()._close()
            self._shared.close()
            if self._background:
                await asyncio.wait(self._background, timeout=docker_client.QUICK_S)
            if self._leaving:
                names = frozenset(self._leaving)
                await self._call(lambda: docker_client.await_removed(names, LEAVING_S))
                self._leaving.clear()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ensure(self, image: images.Image) -> str:
        return await asyncio.to_thread(images.ensure_docker_image, image, self._progress)

    async def _start(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        """Starts a sandbox in a shared container, or in a separate container if the spec names a runtime or this daemon's containers cannot
        be shared.

        The keeper of a shared container has capabilities that no process in a separate container has, and it runs on the image's python3.
        So sandboxes share a container only if their image is built from a distribution's packages, not pulled or built from a Dockerfile.
        """
        if image.from_packages and not spec.runtime and not self._sharing_problem:
            try:
                return await self._start_shared(spec, image)
            except SandboxError as error:
                if self._has_shared or not (self._sharing_problem or isinstance(error, CannotShare | NeverAnswered)):
                    raise
                if not self._sharing_problem:  # otherwise a concurrent opening noticed the problem and stopped this container
                    self._sharing_problem = str(error)
                    self._shared.close()
                    log.warning(
                        "sandboxes cannot share a container of this daemon, so each sandbox gets a separate one, which costs more: %s",
                        error,
                    )
        return await self._start_alone(spec, image)

    async def _start_alone(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        async with self._startup(spec) as start:
            options = limits.server_options(start.name, spec)
            container = self._container(spec, image, start.folder, options)
            link = await self._connect(start.name, container, start.folder, image.program)
            streams = await asyncio.open_unix_connection(sock=link, limit=_STREAM_BYTES)

        async def end(ended: bool) -> None:
            await (self._leave(start.name) if ended else self._discard(start.name))

        return await self._greeted(start, streams, SandboxProcesses.from_options(options, 0).kill_programs, end)

    # Shared containers ------------------------------------------------------------------------------------------------

    async def _start_shared(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        """Starts a sandbox in a shared container. Raises `CannotShare` if the first sandbox fails for a reason that applies to all shared
        containers."""
        async with self._startup(spec) as start:
            key = (image.tree, image.server, spec)
            container = await self._shared.acquire(key, lambda name: self._start_keeper(name, spec, image))
            start.undo.callback(self._shared.release, container)
            keeper = container.starting.result()
            ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)
                streams = await asyncio.open_unix_connection(sock=ours, limit=_STREAM_BYTES)  # closes `ours` if it fails
                start.undo.callback(streams[1].close)
                description = self._describe(start.name, spec)
                listener = start.folder / egress.LINK if start.listener else None
                shared = _request_sandbox(keeper, description, theirs, listener, image.replacement)

        async def end(ended: bool) -> None:
            try:
                await keeper.end(shared, PATIENCE_S if ended else 0.0)
            finally:
                self._shared.release(container)

        relieve = SandboxProcesses.from_options(description["options"], 0).kill_programs
        try:
            sandbox = await self._greeted(start, streams, relieve, end, explain=lambda: shared.failure)
        except SandboxError:
            if shared.refused and not self._has_shared:
                raise CannotShare(shared.failure) from None
            raise
        self._has_shared = True
        return sandbox

    async def _start_keeper(self, name: str, spec: SandboxSpec, image: ReadyImage) -> KeeperClient:
        async with sandbox_folder(name) as folder, asyncio.timeout(docker_client.REQUEST_S):
            write_run_label(folder, "container", self.run_label)
            container = self._shared_container(name, spec, image, folder)
            link = await self._connect(name, container, folder, image.server, socket.SOCK_SEQPACKET)
            keeper = KeeperClient(link, name)
            try:
                await keeper.ready()
            except BaseException:
                keeper.close()
                await self._discard(name)
                raise
        return keeper

    def _stop(self, container: Container) -> None:
        """Stops a shared container in the background. `close` waits up to `docker_client.QUICK_S` seconds for this."""
        spawn(self._end_container(container), self._background, name=f"end {container.name}")

    async def _end_container(self, container: Container) -> None:
        container.starting.cancel()  # has no effect if the container has started
        await asyncio.wait([container.starting])
        if not container.starting.cancelled() and container.starting.exception() is None:
            container.starting.result().close()
            await asyncio.to_thread(remove_folder, runtime_folder() / lease() / container.name)
            await self._leave(container.name)

    # Daemon calls -----------------------------------------------------------------------------------------------------

    async def _connect(
        self, name: str, container: dict[str, Any], folder: Path, program: Path, kind: socket.SocketKind = socket.SOCK_STREAM
    ) -> socket.socket:
        """Starts a container. Returns the connection from the container's first process, which connects before any other program runs in
        the container."""
        folder.chmod(0o711)  # the user inside must reach the socket; only this user can enter the folders above
        server = folder / f"exec_server{program.suffix}"
        shutil.copyfile(program, server)
        server.chmod(0o644)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listen_at(folder / "link", kind))
            stack.callback((folder / "link").unlink, missing_ok=True)
            starting = asyncio.ensure_future(self._call(lambda: docker_client.create_and_start(name, container)))
            try:
                await asyncio.shield(starting)
                return await self._accept(listener, name)
            except BaseException:
                self._leaving[name] = time.monotonic()  # `close` removes it if the following fails
                undoing = spawn(self._undo(starting, name), self._background, name=f"undo {name}")
                await asyncio.wait([undoing], timeout=UNDO_S)
                raise

    async def _accept(self, listener: socket.socket, name: str) -> socket.socket:
        """Returns the container's connection. Raises `NeverAnswered` if the container exits before it connects. The caller sets the
        deadline."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    return await accept(listener)
            if not await self._call(lambda: docker_client.is_running(name)):
                raise NeverAnswered(
                    f"container {name} exited before its exec server connected; check that its image has python3 (3.9 or later)"
                )

    async def _undo(self, starting: asyncio.Future[None], name: str) -> None:
        """After a failed start, waits for the daemon's response and removes the container. If the removal fails, `close` retries it."""
        with contextlib.suppress(SandboxError):
            await starting
        with contextlib.suppress(SandboxError):
            await self._discard(name)

    async def _leave(self, name: str) -> None:
        """Leaves the removal of a container to the daemon. If at least `_SWEEP_AT` containers are recorded, forces the removal of those
        that have been recorded for longer than `LEAVING_S`."""
        now = time.monotonic()
        self._leaving[name] = now
        if len(self._leaving) >= _SWEEP_AT:
            due = frozenset(other for other, since in self._leaving.items() if since < now - LEAVING_S)
            for other in due:
                del self._leaving[other]
            if due:
                await self._call(lambda: docker_client.await_removed(due, 0.0))

    async def _discard(self, name: str) -> None:
        await asyncio.shield(self._call(lambda: docker_client.remove(name)))
        self._leaving.pop(name, None)

    async def _call(self, work: Callable[[], T]) -> T:
        """Runs a blocking daemon call in one of this backend's threads. Raises the errors of the call, and `SandboxTimeout` if it hangs."""
        try:
            async with asyncio.timeout(docker_client.REQUEST_S + 5):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except SandboxError:  # a `SandboxTimeout` is a `TimeoutError` too
            raise
        except TimeoutError:
            raise SandboxTimeout(f"the Docker daemon did not answer within {docker_client.REQUEST_S:.0f} s") from None

    # Specifications ---------------------------------------------------------------------------------------------------

    def _container(self, spec: SandboxSpec, image: ReadyImage, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the create request for a container with one sandbox, whose exec server receives `options`."""
        mounts = {"/agentrl": folder, **limits.write_system_files(folder, options)}
        shares_kernel = spec.runtime in SHARING
        if not shares_kernel:  # a separate kernel shows its own cores, and has separate terminals and buffers
            del mounts[limits.CORES_FILE]
        binds = [{"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": True} for target, source in mounts.items()]
        host = {
            **_host_config(spec.memory_mb << 20, limits.socket_bytes(spec), spec.processes + 1),
            "CapAdd": ["SETPCAP", *limits.server_capabilities()],
            "SecurityOpt": ["no-new-privileges"],
            "Tmpfs": {path: f"rw,nosuid,nodev,exec,{size}" for path, size in _tmpfs(spec).items()},
            "NanoCpus": int(spec.cpus * 1e9),
            "Mounts": [*binds, *([TERMINALS] if shares_kernel else [])],
            "Sysctls": limits.NETWORK_SETTINGS if shares_kernel else {},
            "ReadonlyPaths": _READ_ONLY,
        }
        if spec.runtime:
            host["Runtime"] = spec.runtime
        return self._request(image, [image.program_path, "connect:/agentrl/link", json.dumps(options)], host)

    def _shared_container(self, name: str, spec: SandboxSpec, image: ReadyImage, folder: Path) -> dict[str, Any]:
        """Returns the create request for a shared container. The limits of the container suffice for all sandboxes in it, and each sandbox
        has its own limits.

        The keeper of the container may create namespaces and mounts; the processes that the keeper starts give up these rights before they
        run a program.
        """
        memory = shared_containers.SLOTS * (spec.memory_mb << 20) + shared_containers.KEEPER_BYTES
        processes = shared_containers.SLOTS * (spec.processes + 1) + 1
        host = {
            **_host_config(memory, shared_containers.SLOTS * limits.socket_bytes(spec), processes),
            "CapAdd": ["SETPCAP", "SYS_ADMIN", "SYS_CHROOT", "NET_ADMIN", "MKNOD", *limits.server_capabilities()],
            "SecurityOpt": ["no-new-privileges", "apparmor=unconfined"],  # the default profile allows no mount
            "Tmpfs": dict.fromkeys(("/tmp", "/home/agent"), "rw,nosuid,nodev,noexec,mode=755,size=65536"),
            "Mounts": [{"Type": "bind", "Source": str(folder), "Target": "/agentrl", "ReadOnly": True}],
        }
        command = [f"/agentrl/exec_server{image.server.suffix}", "keep:/agentrl/link"]
        return self._request(image, command, host, {docker_client.LABEL_SHARED: "yes"})

    def _request(self, image: ReadyImage, command: list[str], host: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
        return {
            "Image": image.tree,
            "Entrypoint": ["python3", "-I", *command],
            "User": "0:0",
            "Env": ["LANG=C.UTF-8"],
            "WorkingDir": "/",
            "Hostname": "sandbox",
            "NetworkDisabled": True,
            "Labels": {docker_client.LABEL_RUN: self.run_label, docker_client.LABEL_LEASE: lease(), **(labels or {})},
            "HostConfig": host,
        }

    def _describe(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        """Returns the description of one sandbox for a keeper (see `agentrl.sandbox.inside.isolation`)."""
        options = limits.server_options(name, spec)
        if spec.network:
            options["network"] = {**options["network"], "link": f"fd:{EGRESS_FD}"}
        return {
            "name": name,
            "options": options,
            "bounds": limits.group_limits(spec, 1),  # the exec server counts as a process
            "namespaces": list(NAMESPACES),
            "files": {**limits.system_files(options), "/etc/hosts": _HOSTS, "/etc/hostname": "sandbox\n"},
            "terminals": limits.TERMINAL_OPTIONS,
            "settings": limits.NETWORK_SETTINGS,
            "tmpfs": _tmpfs(spec),
        }


def _host_config(memory: int, socket_bytes: int, processes: int) -> dict[str, Any]:
    return {
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "ReadonlyRootfs": True,
        "Memory": memory,
        "MemorySwap": memory,
        "KernelMemoryTCP": socket_bytes,  # cgroup version 1 counts it separately
        "PidsLimit": processes,
        "LogConfig": {"Type": "none", "Config": {}},
        "AutoRemove": True,
        "IpcMode": "none",  # a new namespace, without a /dev/shm
        "CgroupnsMode": "private",
    }


def _tmpfs(spec: SandboxSpec) -> dict[str, str]:
    """Returns a mapping writable folder -> options for its tmpfs mount."""
    sizes = dict.fromkeys(limits.WRITABLE_FOLDERS, limits.disk_bytes(spec)) | {"/dev/shm": limits.shared_memory_bytes(spec)}
    return {path: f"mode=1777,size={size},nr_inodes={limits.max_inodes(spec)}" for path, size in sizes.items()}


def _request_sandbox(
    keeper: KeeperClient, description: dict[str, Any], link: socket.socket, listener: Path | None, server: Path | None
) -> SharedSandbox:
    """Requests a sandbox from a keeper. Passes the keeper the sandbox's end of its connection and, unless they are None, a connection to
    `listener` and the open file `server`.

    `listener` is the egress listener's socket. `server` replaces the exec server.
    """
    with contextlib.ExitStack() as stack:
        descriptors = {"link": link.fileno()}
        if listener is not None:
            egress_link = stack.enter_context(socket.socket(socket.AF_UNIX))
            egress_link.connect(str(listener))
            descriptors["egress"] = egress_link.fileno()
        if server is not None:
            descriptors["program"] = stack.enter_context(open(server, "rb")).fileno()
        return keeper.open(description, descriptors)

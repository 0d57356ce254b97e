"""Sandboxes made by bubblewrap: namespaces without a daemon.

The sandbox's file tree is the image's, read-only, with tmpfs of limited size for the working directory, /tmp and /dev/shm. There
is no network, a pid namespace of its own, no capability, and a system call filter (`agentrl.sandbox.seccomp`).

Run by root, each sandbox gets a control group for memory, processes and CPU time (`agentrl.sandbox.cgroups`), and the exec
server gives up root before it runs anything: programs get one user, the server another. Run by anyone else, bubblewrap maps a
user namespace with one user in it, and limits are per process where the kernel offers no better.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Coroutine, Mapping
from pathlib import Path, PurePath
from typing import Any

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.records import SandboxSpec
from agentrl.sandbox import cgroups, egress, images, limits
from agentrl.sandbox.backend import ChannelBackend, ReadyImage
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.inside.users import ENVIRONMENT
from agentrl.sandbox.lease import remove_folder, sandbox_folder, sandbox_name, write_run_label
from agentrl.sandbox.processes import SandboxProcesses

log = logging.getLogger(__name__)

USER = 65534
OVERLAY = "mount of overlay"
"""Part of the exec server's error if the kernel has no overlay file system."""
ENDING_S = 60.0
"""How long a sandbox's killed processes may take to end: each needs CPU time for that, which a busy machine gives late."""
PATIENCE_S = 1.0


class BubblewrapBackend(ChannelBackend):
    """Opens sandboxes with `bwrap`; see `SandboxBackend`. `run_label` is shown by `agentrl sandbox ls`."""

    name = "bubblewrap"

    def __init__(self, *, run_label: str, root: Path, progress: images.Progress = images.no_progress) -> None:
        super().__init__(run_label=run_label, root=root, progress=progress)
        self._hierarchy = cgroups.find_hierarchy()
        self._separates = os.geteuid() == 0  # gives each sandbox separate inodes (`agentrl.sandbox.inside.separate`)
        self._has_separated = False

    async def prepare(self, spec: SandboxSpec) -> None:
        """See `ChannelBackend.prepare`. Raises `SandboxUnavailable` for a spec that names a container runtime."""
        if spec.runtime:
            raise SandboxUnavailable(
                f"sandbox runtime {spec.runtime!r} needs Docker", fix="use sandbox.backend=docker, or leave runtime empty"
            )
        await super().prepare(spec)

    async def _ensure(self, image: images.Image) -> str:
        return str(await asyncio.to_thread(images.ensure_rootfs, image, self._progress))

    async def _start(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        """Whether a sandbox has started with separate inodes. If the first one cannot have them, none gets them, with a warning."""
        try:
            sandbox = await self._started(spec, image)
        except SandboxError as error:
            if self._has_separated or not self._separates or OVERLAY not in str(error):
                raise
            self._separates = False
            log.warning("bubblewrap sandboxes share inodes here: a program can see which image files other sandboxes open: %s", error)
            return await self._started(spec, image)
        self._has_separated = self._separates
        return sandbox

    async def _started(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        name = sandbox_name()
        async with sandbox_folder(name) as folder, contextlib.AsyncExitStack() as undo:  # nothing here waits for a process to end
            write_run_label(folder, self.name, self.run_label)
            listener = egress.EgressListener.for_spec(name, spec, folder)
            if listener is not None:
                undo.callback(listener.discard)
            group = self._hierarchy.group(name) if self._hierarchy is not None else None
            if group is not None:
                undo.callback(group.remove)
            ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)
                reader, writer = await asyncio.open_unix_connection(sock=ours)  # closes `ours` when it fails
                undo.callback(writer.close)
                options = self._options(name, spec)
                process = await self._spawn(name, spec, image, folder, theirs.fileno(), group, options)
            undo.pop_all()

        async def destroy(ended: bool) -> None:
            self._open.pop(name, None)
            if listener is not None:
                await listener.close()
            await _end(process, patience_s=PATIENCE_S if ended else 0.0)
            if group is not None:
                await asyncio.to_thread(group.remove)
            await asyncio.to_thread(remove_folder, folder)

        channel = Channel(reader, writer, name=name, relieve=SandboxProcesses.from_options(options, process.pid).kill_programs)
        sandbox = ChannelSandbox(name, spec, channel, destroy)
        return await self._greeted(sandbox, channel, listener, explain=lambda: f"bwrap says: {_log(folder) or 'nothing'}")

    async def _spawn(
        self,
        name: str,
        spec: SandboxSpec,
        image: ReadyImage,
        folder: Path,
        link: int,
        group: cgroups.ControlGroup | None,
        options: dict[str, Any],
    ) -> subprocess.Popen[bytes]:
        """Starts bwrap, puts it into its control group while it waits for its arguments, and only then tells it what to do.

        The group is made in a thread: the kernel takes 10 ms to move a process, and more when many are moved.
        """
        shown = {**limits.write_system_files(folder, options), **egress.socket_mounts(folder, spec)}
        with contextlib.ExitStack() as stack:
            args_read, args_write = os.pipe()
            stack.callback(os.close, args_read)
            arguments = stack.enter_context(open(args_write, "wb"))
            log = stack.enter_context(open(folder / "log", "wb"))
            server = ["python3", "-I", image.program_path, f"fd:{link}", json.dumps(options)]
            process = subprocess.Popen(
                ["bwrap", "--args", str(args_read), *server],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[link, args_read],
                env={},
                cwd="/",
                start_new_session=True,
            )
            try:
                if self._hierarchy is not None:
                    await _to_its_end(asyncio.to_thread(self._confine, name, spec, process.pid))
                arguments.write(b"".join(os.fsencode(word) + b"\0" for word in self._view(spec, image, shown, group)))
            except BaseException:
                await _end(process, patience_s=0.0)
                raise
            return process

    def _confine(self, name: str, spec: SandboxSpec, pid: int) -> None:
        assert self._hierarchy is not None
        self._hierarchy.create(name, spec).add(pid)

    def _view(self, spec: SandboxSpec, image: ReadyImage, shown: Mapping[str, Path], group: cgroups.ControlGroup | None) -> list[str]:
        """What the sandbox sees and may do, as bwrap options."""
        disk, shared = str(limits.disk_bytes(spec)), str(limits.shared_memory_bytes(spec))
        words = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
        words += ["--as-pid-1", "--die-with-parent", "--clearenv", "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME", "/home/agent"]
        words += ["--setenv", "PATH", ENVIRONMENT["PATH"], "--ro-bind", image.tree, "/"]
        words += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]  # in a user namespace some settings are its user's to write
        words += ["--dev", "/dev", "--perms", "1777", "--size", shared, "--tmpfs", "/dev/shm"]
        words += ["--perms", "1777", "--size", disk, "--tmpfs", "/tmp", "--perms", "1777", "--size", disk, "--tmpfs", "/home/agent"]
        words += ["--size", "65536", "--tmpfs", "/sys"]
        for parent in reversed(PurePath(limits.CORES_FILE).parents[:-2]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--size", "65536", "--tmpfs", "/agentrl", "--ro-bind", str(image.program), image.program_path]
        for place, source in shown.items():
            words += ["--ro-bind", str(source), place]
        if group is not None and group.memory_events.exists():
            words += ["--ro-bind", str(group.memory_events), "/agentrl/memory"]
        words += ["--remount-ro", "/agentrl", "--remount-ro", "/sys", "--remount-ro", "/dev", "--chdir", "/", "--cap-drop", "ALL"]
        if os.geteuid() == 0:  # the exec server needs these to stop being root; it drops them before anything else runs
            rights = ("SETPCAP", "SYS_ADMIN", "SYS_CHROOT", "MKNOD", *limits.server_capabilities())
            return [*words, *(word for right in rights for word in ("--cap-add", f"CAP_{right}"))]
        return [*words, "--unshare-user", "--uid", str(USER), "--gid", str(USER)]

    def _options(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        """What the exec server is told: bounds that bwrap has no option for (files of each place, terminals, sockets), and limits."""
        options = limits.server_options(name, spec, grouped=self._hierarchy is not None)
        options["tmpfs"] = dict.fromkeys(limits.WRITABLE_FOLDERS, f"nr_inodes={limits.max_inodes(spec)}")
        options["terminals"], options["settings"] = limits.TERMINAL_OPTIONS, limits.NETWORK_SETTINGS
        if self._separates:
            options["shown"] = [path for path in limits.system_files(options) if not path.startswith("/sys/")]
        if self._hierarchy is None:
            disk = limits.disk_bytes(spec)
            options["limits"] |= {"RLIMIT_NPROC": spec.processes + 1, "RLIMIT_AS": spec.memory_mb << 20, "RLIMIT_FSIZE": disk}
        return options


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Waits for `work` also when the caller is cancelled meanwhile: what it works on must not be taken away under its hands."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends bwrap and what it started, at once. The sandbox's first process does not die with bwrap: by giving up root it has
    lost the signal that its parent's death would send (prctl(2), PR_SET_PDEATHSIG). It shares bwrap's process group.

    Must run before bwrap is waited for: until then its number, which names the group, is nobody else's.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Gives bwrap `patience_s` to end by itself, and kills what is left of its process group. Raises `SandboxError`."""
    start = asyncio.get_running_loop().time()
    pause = 0.001
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT  # leaves the zombie, and with it the group's number, in place
    while os.waitid(os.P_PID, process.pid, ended) is None:
        waited = asyncio.get_running_loop().time() - start
        if waited > ENDING_S:
            raise SandboxError(f"bwrap (pid {process.pid}) does not end")
        if waited >= patience_s:
            _kill(process)
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.1)
    _kill(process)
    process.wait()


def _log(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "log").read_text(errors="replace")[-500:].strip()
    return ""


def unavailable_reason(timeout_s: float = 10.0) -> str:
    """Empty when bubblewrap can make a sandbox's namespaces here, else what it says."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
    if os.geteuid() != 0:
        command.insert(1, "--unshare-user")
    try:
        result = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"bwrap does not end in {timeout_s:.0f} s"
    return "" if result.returncode == 0 else result.stderr.decode("utf-8", "replace").strip()[-300:] or f"status {result.returncode}"

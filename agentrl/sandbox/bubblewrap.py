"""Sandboxes in bubblewrap: kernel namespaces without a daemon.

A sandbox sees the image's file tree read-only, with tmpfs mounts of limited size for the working directory, /tmp and /dev/shm. Each sandbox
has a separate pid namespace and a system call filter (`agentrl.sandbox.seccomp`), but no capabilities and no network except the proxy of
its allow-list (`agentrl.sandbox.egress`).

If the driver runs as root, each sandbox has a control group (`agentrl.sandbox.limits.ControlGroups`), and its exec server gives up root
before any program runs, so the server and the programs run as different users. Otherwise bubblewrap creates a user namespace with one user,
and the limits are resource limits (setrlimit(2)) instead of a control group.
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
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from agentrl.errors import SandboxError, SandboxUnavailable
from agentrl.records import SandboxSpec
from agentrl.sandbox import egress, images, limits
from agentrl.sandbox.backend import ChannelBackend, ReadyImage, Startup
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.sandbox.inside.users import ENVIRONMENT
from agentrl.sandbox.processes import SandboxProcesses

log = logging.getLogger(__name__)

USER = 65534
ENDING_S = 60.0
"""How long killed processes may take to exit. Each needs CPU time to exit, which a busy machine grants late."""
PATIENCE_S = 1.0
_NO_OVERLAY = "mount of overlay"  # in the exec server's error if the kernel has no overlay file system


class BubblewrapBackend(ChannelBackend):
    """Opens sandboxes with `bwrap`. See `SandboxBackend` and `ChannelBackend`."""

    name = "bubblewrap"

    def __init__(self, *, run_label: str, root: Path, progress: images.Progress = images.no_progress) -> None:
        super().__init__(run_label=run_label, root=root, progress=progress)
        self._groups = limits.find_control_groups()
        self._separates = os.geteuid() == 0  # whether each sandbox gets separate inodes (`agentrl.sandbox.inside.isolation`)
        self._has_separated = False

    async def prepare(self, spec: SandboxSpec) -> None:
        """See `ChannelBackend.prepare`. Raises `SandboxUnavailable` if the spec names a container runtime."""
        if spec.runtime:
            raise SandboxUnavailable(
                f"sandbox runtime {spec.runtime!r} needs Docker", fix="use sandbox.backend=docker, or leave runtime empty"
            )
        await super().prepare(spec)

    async def _ensure(self, image: images.Image) -> str:
        return str(await asyncio.to_thread(images.ensure_rootfs, image, self._progress))

    async def _start(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        """Starts a sandbox. If the first sandbox cannot have separate inodes, logs a warning and starts this sandbox and all later
        sandboxes without separate inodes."""
        try:
            sandbox = await self._start_once(spec, image)
        except SandboxError as error:
            if self._has_separated or not self._separates or _NO_OVERLAY not in str(error):
                raise
            self._separates = False
            log.warning("bubblewrap sandboxes share inodes here, so a program can see which image files other sandboxes open: %s", error)
            return await self._start_once(spec, image)
        self._has_separated = self._separates
        return sandbox

    async def _start_once(self, spec: SandboxSpec, image: ReadyImage) -> ChannelSandbox:
        async with self._startup(spec) as start:
            if self._groups is not None:
                start.undo.callback(self._groups.end, start.name)
            ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)
                streams = await asyncio.open_unix_connection(sock=ours)  # closes `ours` if it fails
                start.undo.callback(streams[1].close)
                options = self._options(start.name, spec)
                process = await self._spawn(start, image, theirs.fileno(), options)

        async def end(ended: bool) -> None:
            await _end(process, patience_s=PATIENCE_S if ended else 0.0)
            if self._groups is not None:
                await asyncio.to_thread(self._groups.end, start.name)

        def explain() -> str:
            with contextlib.suppress(OSError):
                return f"bwrap's log: {(start.folder / 'log').read_text(errors='replace')[-500:].strip() or 'empty'}"
            return ""

        relieve = SandboxProcesses.from_options(options, process.pid).kill_programs
        return await self._greeted(start, streams, relieve, end, explain=explain)

    async def _spawn(self, start: Startup, image: ReadyImage, link: int, options: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Starts bwrap, moves it into the control group of the sandbox, and then sends the arguments that bwrap waits for.

        The group is created in a thread, because the kernel takes 10 ms to move a process into it, and longer if many are moved at once.
        """
        mounts = {**limits.write_system_files(start.folder, options), **egress.socket_mounts(start.folder, start.spec)}
        with contextlib.ExitStack() as stack:
            args_read, args_write = os.pipe()
            stack.callback(os.close, args_read)
            arguments = stack.enter_context(open(args_write, "wb"))
            output = stack.enter_context(open(start.folder / "log", "wb"))
            server = ["python3", "-I", image.program_path, f"fd:{link}", json.dumps(options)]
            process = subprocess.Popen(
                ["bwrap", "--args", str(args_read), *server],
                executable=shutil.which("bwrap"),  # `env` has no PATH
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[link, args_read],
                env={},
                cwd="/",
                start_new_session=True,
            )
            try:
                memory_events = None
                if self._groups is not None:
                    confining = asyncio.create_task(asyncio.to_thread(self._groups.confine, start.name, start.spec, process.pid))
                    try:
                        await asyncio.shield(confining)
                    except asyncio.CancelledError:
                        await asyncio.wait([confining])  # what it uses must not be removed while it runs
                        raise
                    memory_events = self._groups.memory_events(start.name)
                view = self._view(start.spec, image, mounts, memory_events)
                arguments.write(b"".join(os.fsencode(word) + b"\0" for word in view))
            except BaseException:
                await _end(process, patience_s=0.0)
                raise
            return process

    def _view(self, spec: SandboxSpec, image: ReadyImage, mounts: Mapping[str, Path], memory_events: str | None) -> list[str]:
        """Returns bwrap's options: what the sandbox sees and may do."""
        disk, shared = str(limits.disk_bytes(spec)), str(limits.shared_memory_bytes(spec))
        words = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
        words += ["--as-pid-1", "--die-with-parent", "--clearenv", "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME", "/home/agent"]
        words += ["--setenv", "PATH", ENVIRONMENT["PATH"], "--ro-bind", image.tree, "/"]
        words += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]  # the user of a user namespace may write to some settings
        words += ["--dev", "/dev", "--perms", "1777", "--size", shared, "--tmpfs", "/dev/shm"]
        words += ["--perms", "1777", "--size", disk, "--tmpfs", "/tmp", "--perms", "1777", "--size", disk, "--tmpfs", "/home/agent"]
        words += ["--size", "65536", "--tmpfs", "/sys"]
        for parent in reversed(PurePath(limits.CORES_FILE).parents[:-2]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--size", "65536", "--tmpfs", "/agentrl", "--ro-bind", str(image.program), image.program_path]
        for path, source in mounts.items():
            words += ["--ro-bind", str(source), path]
        if memory_events is not None and os.path.exists(memory_events):
            words += ["--ro-bind", memory_events, "/agentrl/memory"]
        words += ["--remount-ro", "/agentrl", "--remount-ro", "/sys", "--remount-ro", "/dev", "--chdir", "/", "--cap-drop", "ALL"]
        if os.geteuid() != 0:
            return [*words, "--unshare-user", "--uid", str(USER), "--gid", str(USER)]
        for right in ("SETPCAP", "SYS_ADMIN", "SYS_CHROOT", "MKNOD", *limits.server_capabilities()):
            words += ["--cap-add", f"CAP_{right}"]  # needed to give up root; the exec server drops them before any program runs
        return words

    def _options(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        """Returns the exec server's options, including the limits that bwrap cannot set."""
        options = limits.server_options(name, spec, grouped=self._groups is not None)
        options["tmpfs"] = dict.fromkeys(limits.WRITABLE_FOLDERS, f"nr_inodes={limits.max_inodes(spec)}")
        options["terminals"], options["settings"] = limits.TERMINAL_OPTIONS, limits.NETWORK_SETTINGS
        if self._separates:
            options["shown"] = [path for path in limits.system_files(options) if not path.startswith("/sys/")]
        if self._groups is None:
            disk = limits.disk_bytes(spec)
            options["limits"] |= {"RLIMIT_NPROC": spec.processes + 1, "RLIMIT_AS": spec.memory_mb << 20, "RLIMIT_FSIZE": disk}
        return options


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills bwrap's process group, which the sandbox's first process shares.

    The first process does not exit with bwrap, because giving up root cleared its parent-death signal (prctl(2), PR_SET_PDEATHSIG). Call
    this function before reaping bwrap: until then, the pid of bwrap, which is also the group's id, cannot be reused.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Waits up to `patience_s` for bwrap to exit, then kills its process group. Raises `SandboxError` if bwrap has not exited after
    `ENDING_S` seconds."""
    start = asyncio.get_running_loop().time()
    pause = 0.001
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT  # keeps the zombie, so the group's id is not reused
    while os.waitid(os.P_PID, process.pid, flags) is None:
        waited = asyncio.get_running_loop().time() - start
        if waited > ENDING_S:
            raise SandboxError(f"bwrap (pid {process.pid}) did not exit within {ENDING_S:.0f} s")
        if waited >= patience_s:
            _kill(process)
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.1)
    _kill(process)
    process.wait()


def unavailable_reason(timeout_s: float = 10.0) -> str:
    """Returns the reason why bubblewrap cannot create a sandbox's namespaces on this machine; empty if bubblewrap works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
    if os.geteuid() != 0:
        command.insert(1, "--unshare-user")
    try:
        result = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"bwrap did not exit within {timeout_s:.0f} s"
    return "" if result.returncode == 0 else result.stderr.decode("utf-8", "replace").strip()[-300:] or f"status {result.returncode}"

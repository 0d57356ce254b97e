"""A host: a long-lived process in a different Python environment that runs third-party code for many episodes.

agentrl starts a host, communicates with it in lines of JSON over a socket (`inside/host_channel.py`), and restarts it if it exits or
blocks. Everything that a host sends is untrusted: the size of messages is limited, every call has a deadline, and an unknown or late reply
is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.base import user_code
from agentrl.base.scratch import ScratchFolder
from agentrl.base.secrets import child_environment, redact
from agentrl.errors import InfrastructureError, PolicyFault, TaskError, UserError
from agentrl.records.fields import json_value

log = logging.getLogger(__name__)

INSIDE = Path(__file__).parent / "inside"
MAX_MESSAGE = 96 << 20
"""Maximum size of a message, in bytes. A message may contain a base64-encoded file from a sandbox."""
MAX_DESCRIPTION = 256 << 20
DESCRIBE_S = 300.0
"""Seconds within which a host must load its tasks."""
PING_S = 10.0
SILENT_S = 60.0
"""A host that does not answer a ping within this many seconds (`DESCRIBE_S` for the first) is killed: its code blocks the event loop."""
MAX_DEATHS = 5
"""Maximum number of times that a host is restarted without a successful call in between. Pings do not count as calls."""
RESTART_S = 0.5
MAX_SERVED = 512
"""Maximum number of requests from a host that are served at the same time."""
_TAIL = 40  # number of lines of the host's output in an error message
_LARGE = 1 << 20  # messages of more than this many bytes are parsed in a thread

Serve = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Serves a request that the host sends during a call. Arguments: the method and its parameters. Returns JSON data."""


class HostDied(InfrastructureError):
    """The host process exited or could not be started, or it was killed because it did not respond."""


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """The command of a host: `python inside/SCRIPT.py`, with `config` on standard input."""

    name: str  # used in messages, such as "inspect:tasks.py@arithmetic"
    python: str
    script: str  # file in `inside/`
    config: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)  # additional variables
    folder: Path = field(default_factory=Path.cwd)  # working directory

    def command(self, *arguments: str) -> list[str]:
        """Returns the command line."""
        return [self.python, str(INSIDE / self.script), *arguments]

    def variables(self, temporary: str) -> dict[str, str]:
        """Returns the environment variables of the host process: those of this process except secrets and Python settings, plus those in
        `environment`.

        `temporary`: folder for the host's temporary files. The host cannot remove these files, because its process is killed.
        """
        own = child_environment(os.environ)
        return {name: value for name, value in own.items() if not name.startswith("PYTHON")} | {**self.environment, "TMPDIR": temporary}


def describe(spec: HostSpec) -> Any:
    """Runs the script once and returns its description of the tasks.

    Raises `UserError` if the script cannot be started, reports an error, exits without a valid description of at most `MAX_DESCRIPTION`
    bytes, or runs for more than `DESCRIBE_S` seconds.
    """
    with ScratchFolder() as folder:
        file, output = folder / "description", folder / "output"
        status = _run(spec, file, output)
        described: Any = None
        if file.is_file() and file.stat().st_size <= MAX_DESCRIPTION:
            with contextlib.suppress(ValueError, RecursionError):
                described = json_value(json.loads(file.read_bytes()))
        if not isinstance(described, dict):
            tail = output.read_bytes()[-2000:].decode("utf-8", "replace").strip()
            raise UserError(f"{spec.name}: its host ended with status {status} and did not describe the tasks: {tail}")
    if "error" in described:
        error = described["error"]
        raise UserError(f"{spec.name}: {str(error.get('message', '') if isinstance(error, Mapping) else error)[:4000]}")
    return described.get("result")


def _run(spec: HostSpec, file: Path, output: Path) -> int:
    """Runs the script with `describe FILE` and returns its exit status. Raises `UserError` if the script cannot be started, or if it does
    not exit in time."""
    try:
        with output.open("wb") as out:
            process = subprocess.Popen(
                spec.command("describe", str(file)),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=spec.folder,
                env=spec.variables(str(file.parent)),
                start_new_session=True,
            )
    except OSError as error:
        raise UserError(f"{spec.name}: {spec.python} cannot be started: {error.strerror or error}") from None
    try:
        process.communicate(json.dumps(spec.config).encode(), timeout=DESCRIBE_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{spec.name}: loading the tasks took more than {DESCRIBE_S:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


@dataclass(slots=True)
class _Call:
    future: asyncio.Future[Any]
    serve: Serve | None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Host:
    """Starts the process of a `HostSpec` at the first call, and restarts it if it has exited. Use a host from only one event loop."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.deaths = 0  # deaths since the last successful call other than a ping
        self._process: _Process | None = None
        self._starting = asyncio.Lock()

    async def call(self, method: str, params: Mapping[str, Any], *, timeout_s: float, serve: Serve | None = None) -> Any:
        """Sends a request and returns its result, which is JSON data with at most 64 levels. If the call is cancelled, the request is also
        cancelled in the host.

        Args:
            serve: serves the requests that the host sends during this call.

        Raises:
            TaskError, PolicyFault, InfrastructureError: the call failed; the type depends on the blame that the host reports.
            HostDied: the process exited, cannot be started, or has died too often to be restarted (`MAX_DEATHS`).
            InfrastructureError: there is no result within `timeout_s` seconds, including the time to start the process.
        """
        try:
            async with asyncio.timeout(timeout_s):
                result = await (await self._running()).call(method, params, serve)
        except TimeoutError:
            raise InfrastructureError(f"{self.spec.name}: {method} returned no result within {timeout_s:g} s") from None
        if method != "ping":  # a ping precedes each episode, and shows only that the host has started
            self.deaths = 0
        return result

    async def _running(self) -> _Process:
        async with self._starting:
            if self._process is not None and not self._process.ended:
                return self._process
            if self._process is not None:
                self.deaths += 1
                if self.deaths > MAX_DEATHS:
                    raise HostDied(f"{self.spec.name}: its host died {self.deaths} times in a row; the last reason: {self._process.reason}")
                await asyncio.sleep(min(RESTART_S * 2**self.deaths, 30.0))
            self._process = await _Process.start(self.spec)
            return self._process

    async def close(self) -> None:
        """Kills the process."""
        if self._process is not None:
            await self._process.close()


class _Process:
    """One process of a host."""

    def __init__(
        self,
        spec: HostSpec,
        process: asyncio.subprocess.Process,
        folder: ScratchFolder,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._spec, self._process, self._folder, self._writer = spec, process, folder, writer
        self.reason = ""  # why the process was killed or exited
        self._calls: dict[int, _Call] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._task = asyncio.create_task(self._live(reader), name=f"host {spec.name}")

    @property
    def ended(self) -> bool:
        """Whether the process no longer accepts calls."""
        return bool(self.reason)

    @classmethod
    async def start(cls, spec: HostSpec) -> _Process:
        """Starts the process. Raises `HostDied` if it cannot be started."""
        folder = ScratchFolder()
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command(str(theirs.fileno())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                cwd=spec.folder,
                env=spec.variables(str(folder.path)),
                start_new_session=True,  # so that ctrl-C reaches only this process
            )
        except OSError as error:
            ours.close()
            folder.remove()
            raise HostDied(f"{spec.name}: {spec.python} cannot be started: {error.strerror or error}") from None
        finally:
            theirs.close()
        return cls(spec, process, folder, *await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE))

    async def close(self) -> None:
        """Kills the process and waits for it to exit."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def call(self, method: str, params: Mapping[str, Any], serve: Serve | None) -> Any:
        """See `Host.call`."""
        number = next(self._numbers)
        call = self._calls[number] = _Call(asyncio.get_running_loop().create_future(), serve)
        answered = False
        try:
            await self._send({"id": number, "method": method, "params": dict(params)})
            result = await call.future
            answered = True
            return result
        except (TaskError, PolicyFault, InfrastructureError):
            answered = True
            raise
        finally:
            self._calls.pop(number, None)
            for task in call.tasks:
                task.cancel()
            if not answered and not self.ended:
                with contextlib.suppress(Exception):
                    self._writer.write(json.dumps({"cancel": number}).encode() + b"\n")

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self.ended:
            raise HostDied(self.reason)
        self._writer.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # `_live` reports that the process exited
            await self._writer.drain()

    async def _live(self, reader: asyncio.StreamReader) -> None:
        """Reads messages until the host closes its socket, sends an invalid message or stops responding, or until this task is cancelled.
        Then kills the process."""
        parts = [asyncio.create_task(part) for part in (self._read(reader), self._keep_output(), self._configure(), self._watch())]
        reason = "it was closed"
        try:
            done, _ = await asyncio.wait(parts[:1] + parts[3:], return_when=asyncio.FIRST_COMPLETED)
            with user_code.fault_boundary() as fault:
                reason = next(str(task.result()) for task in done)
            if fault.error is not None:
                reason = f"it sent an invalid message: {user_code.describe_error(fault.error, 500)}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = await asyncio.shield(self._process.wait())
            await asyncio.shield(asyncio.to_thread(self._folder.remove))
            await asyncio.wait({parts[1]}, timeout=1.0)
            for task in (*parts, *self._serving):
                task.cancel()
            self._writer.close()
            tail = redact("\n".join(self._tail))[-2000:]
            self.reason = f"{self._spec.name}: the host process ended: {reason} (status {code}){': ' if tail else ''}{tail}"
            for call in self._calls.values():
                if not call.future.done():
                    call.future.set_exception(HostDied(self.reason))
                    call.future.exception()  # marks it as retrieved: its caller may be gone

    async def _configure(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(self._spec.config).encode())
            await self._process.stdin.drain()
            self._process.stdin.close()

    async def _keep_output(self) -> None:
        """Reads the output of the process, so that the process never blocks on a full pipe, and stores the last lines."""
        assert self._process.stdout is not None, "it is a pipe"
        rest = b""
        while data := await self._process.stdout.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            self._tail.extend(line[-500:].decode("utf-8", "replace") for line in lines if line.strip())
            rest = rest[-500:]
        if rest:
            self._tail.append(rest.decode("utf-8", "replace"))

    async def _watch(self) -> str:
        limit_s = DESCRIBE_S  # the host loads its tasks first
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    await self.call("ping", {}, None)
            except TimeoutError:
                return f"it did not respond for {limit_s:g} s, because its code blocks the event loop; it was killed"
            limit_s = SILENT_S
            await asyncio.sleep(PING_S)

    async def _read(self, reader: asyncio.StreamReader) -> str:
        while line := await reader.readline():
            message = json_value(await asyncio.to_thread(json.loads, line) if len(line) > _LARGE else json.loads(line))
            if "method" in message:
                self._serve(message)
            elif (call := self._calls.get(message["id"])) is not None and not call.future.done():
                if "error" in message:
                    call.future.set_exception(_error(message["error"], self._spec.name))
                else:
                    call.future.set_result(message["result"])
        return "it closed its socket"

    def _serve(self, message: Mapping[str, Any]) -> None:
        call = self._calls.get(message["for"])
        if len(self._serving) >= MAX_SERVED:
            raise ValueError(f"more than {MAX_SERVED} requests at the same time")
        task = asyncio.create_task(self._served(message, call))
        for tasks in (self._serving, *(() if call is None else (call.tasks,))):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _served(self, message: Mapping[str, Any], call: _Call | None) -> None:
        answer: dict[str, Any] = {"error": {"blame": "infrastructure", "message": "the episode has ended"}}
        if call is not None and call.serve is not None and not call.future.done():
            with user_code.fault_boundary() as fault:
                answer = {"result": await call.serve(str(message["method"]), message["params"])}
            if (error := fault.error) is not None:
                blame = "task" if isinstance(error, TaskError) else "infrastructure"
                answer = {"error": {"blame": blame, "message": user_code.describe_error(error, 2000)}}
        with contextlib.suppress(HostDied):
            await self._send({"id": message["id"], **answer})


def _error(error: Mapping[str, Any], name: str) -> Exception:
    text = f"{name}: {str(error.get('message', ''))[:4000]}"
    match error.get("blame"):
        case "task":
            return TaskError(text)
        case "policy":
            return PolicyFault(text)
    return InfrastructureError(text)

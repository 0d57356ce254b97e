"""A password-protected Redis server for one run, which stores its data in the run folder."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path
from urllib.parse import quote

import redis

from agentrl.base.files import tail_bytes
from agentrl.base.scratch import ScratchFolder
from agentrl.errors import InfrastructureError, UserError
from agentrl.experience.redis_transport import MAX_ENTRY_BYTES
from agentrl.protocols import Launcher, PartCommand, PartHandle
from agentrl.protocols.cluster import HOST, PARENT, PORT, PYTHON, RUN

_READY_S = 60.0  # maximum time to start and to load its file
_ANSWER_S = 2.0
_END_S = 10.0
LOG = "redis.log"
_PROGRAMS = ("redis-server", "redis-check-rdb")  # one program: argv[0] selects its behaviour; Debian's redis-tools has only the second name
_LAUNCH = (
    "import os, sys; from agentrl.base.processes import die_with_parent; die_with_parent(int(sys.argv[1]));"
    " os.execv(sys.argv[2], ['redis-server', '-'])"
)


def find_program() -> str:
    """Returns the path of the program `redis-server`. Raises `UserError` if this program is not installed."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise UserError("the program redis-server is not installed", fix="apt-get install redis-tools, which starts no service")
    return program


class RedisServer:
    """The process `redis-server`. The server exits when the process that started it exits, even if that process is killed.

    A server that is started later in the same folder has all acknowledged data. Processes on this machine connect through a socket file
    that belongs to the current user. If parts of the run are on other machines, the server also has a port. Start the server in a thread
    that lives as long as the run. Raises `UserError` if the program is not installed.

    Args:
        folder: folder for the server's files and log, in the run folder; created if absent.
        memory_mb: maximum memory for the entries that the driver has not stored, in MiB. If the server is full, workers wait.
    """

    def __init__(self, launcher: Launcher, folder: Path, *, memory_mb: int = 1024) -> None:
        self._program, self._folder, self._memory_mb = find_program(), folder, memory_mb
        self._launcher, self._shared = launcher, ""
        self._password = secrets.token_hex(32)
        self._socket = ScratchFolder()  # not that of the process, because a restarted server keeps the address, which workers know
        self._process: PartHandle | None = None
        self._port = "0" if launcher.is_local else PORT  # a restarted server keeps the port, which workers know

    async def start(self) -> None:
        """Starts the process and returns without waiting until the server is ready."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = await self._launcher.start(
            PartCommand(
                name="redis",
                argv=(PYTHON, "-c", _LAUNCH, PARENT, self._program),
                stdin=self._settings(),  # not a file, which would contain the password
                log=f"{self._folder.name}/{LOG}",
            )
        )
        if self._process.port:
            self._port, self._shared = str(self._process.port), f"redis://:{self._password}@{self._process.host}:{self._process.port}"

    @property
    def url(self) -> str:
        """The address for `RedisTransport` on this machine, with the password."""
        return f"unix://:{self._password}@{quote(f'{self._socket.path}/socket')}"

    @property
    def shared_url(self) -> str:
        """The address for `RedisTransport` on every machine of the run, with the password."""
        return self._shared or self.url

    @property
    def pid(self) -> int:
        """The process id of the running server or, if none is running, of the last one."""
        return self._part.pid

    @property
    def _part(self) -> PartHandle:
        assert self._process is not None, "call start() first"
        return self._process

    def wait_ready(self) -> None:
        """Waits until the server responds. If the server does not start, raises an `InfrastructureError` that contains the end of the
        server's log."""
        deadline = time.monotonic() + _READY_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if self._part.returncode is not None or time.monotonic() > deadline:
                        log = tail_bytes(self._folder / LOG, most=2000)
                        raise InfrastructureError(f"the Redis server in {self._folder} does not start: {error}\n{log}") from error
                time.sleep(0.02)

    def answers(self) -> bool:
        """Whether the server responds within two seconds."""
        try:
            with redis.Redis.from_url(self.url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        """Kills the process without waiting for it to exit. Idempotent."""
        self._part.send_kill()

    async def restart_if_dead(self) -> bool:
        """Restarts the server if its process has exited. Returns whether the server was restarted."""
        if self._part.returncode is None:
            return False
        await self._part.kill()  # releases its port
        await self.start()
        return True

    async def close(self) -> None:
        """Stops the server. Its data remains in the folder."""
        if self._process is not None:
            await self._process.terminate(grace_s=_END_S)
        self._socket.remove()

    def _settings(self) -> str:
        settings = {
            "port": self._port,
            "bind": HOST,
            "dir": f'"{RUN}/{self._folder.name}"',
            "unixsocket": f'"{self._socket.path}/socket"',
            "unixsocketperm": "700",
            "requirepass": self._password,
            "appendonly": "yes",
            "appendfsync": "always",
            "save": '""',
            "maxmemory": f"{self._memory_mb}mb",
            "maxmemory-policy": "noeviction",
            "proto-max-bulk-len": str(MAX_ENTRY_BYTES),
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())

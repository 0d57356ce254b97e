"""A Redis server of one run: reachable through a socket file of this user, with a password, and with its data in the run folder."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import redis

from agentrl.base.files import tail_bytes
from agentrl.errors import InfrastructureError, UserError
from agentrl.experience.redis_transport import MAX_ENTRY_BYTES

_READY_S = 60.0  # to start, and to read its file
_ANSWER_S = 2.0
_END_S = 10.0
_PROGRAMS = ("redis-server", "redis-check-rdb")  # one program, whose first argument decides; Debian's redis-tools has only the second name
_LAUNCH = (
    "import os, sys; from agentrl.base.processes import die_with_parent; die_with_parent(int(sys.argv[1]));"
    " os.execv(sys.argv[2], ['redis-server', '-'])"
)


def find_program() -> str:
    """Returns the path of the program `redis-server`. Raises `UserError` if it is not installed."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise UserError("the program redis-server is not installed", fix="apt-get install redis-tools, which starts no service")
    return program


class RedisServer:
    """The process `redis-server`. It ends with this process, also if that is killed; the next one finds what was acknowledged.

    Start it in a thread that lives as long as the run. Raises `UserError` if the program is not installed.

    Args:
        folder: its files and log; created if absent.
        memory_mb: maximum memory of the entries that the driver has not stored. A full server makes workers wait.
    """

    def __init__(self, folder: Path, *, memory_mb: int = 1024) -> None:
        self._program, self._folder, self._memory_mb = find_program(), folder, memory_mb
        self._password = secrets.token_hex(32)
        self._sockets = Path(tempfile.mkdtemp(prefix="agentrl-redis-"))  # the path of a socket has at most 107 bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._process = self._start()

    @property
    def url(self) -> str:
        """The address for `RedisTransport`, with the password."""
        return f"unix://:{self._password}@{quote(str(self._sockets / 'socket'))}"

    @property
    def pid(self) -> int:
        """The process id of the running or last server."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Returns when the server answers. Raises `InfrastructureError` with the end of its log if it does not start."""
        deadline = time.monotonic() + _READY_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        log = tail_bytes(self._folder / "redis.log", most=2000)
                        raise InfrastructureError(f"the Redis server in {self._folder} does not start: {error}\n{log}") from error
                time.sleep(0.02)

    def answers(self) -> bool:
        """Whether the server answers within two seconds."""
        try:
            with redis.Redis.from_url(self.url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        """Kills the process. Idempotent."""
        self._process.kill()

    def restart_if_dead(self) -> bool:
        """Starts the server again if its process has ended. Returns whether it had."""
        if self._process.poll() is None:
            return False
        self._process = self._start()
        return True

    def close(self) -> None:
        """Ends the server. Its data stays in the folder."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        log = (self._folder / "redis.log").open("ab")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(os.getpid()), self._program],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )
        assert process.stdin is not None
        process.stdin.write(self._settings().encode())  # not a file, which would have the password
        process.stdin.close()
        return process

    def _settings(self) -> str:
        settings = {
            "port": "0",
            "unixsocket": f'"{self._sockets / "socket"}"',
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

"""Key and address of an inference server.

Every route except `GET /health` requires the key. vLLM's `--api-key` guards only paths that start with /v1, /v2, /inference or /cohere,
and leaves `/collective_rpc`, `/update_weights`, `/pause` and `/classify` open to every local user. A learner that uses NCCL finds the
server in a file in the run folder.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically

KEY_VARIABLE = "AGENTRL_SERVER_KEY"
"""Environment variable that contains the key of a server process. The process removes it before the engine starts."""
MIDDLEWARE = f"{__name__}.RequireKey"
"""Value for vLLM's option `--middleware`."""
_OPEN = ("GET", "/health")

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]
_expected = b""  # sha256 of this process's key


def new_key() -> str:
    """Returns a new key of 256 random bits."""
    return secrets.token_urlsafe(32)


def auth_headers(key: str) -> dict[str, str]:
    """Returns the headers for a request to a server with this key, or no headers if the key is empty."""
    return {"authorization": f"Bearer {key}"} if key else {}


def load_key() -> None:
    """Removes this process's key from the environment and keeps its hash. Raises `KeyError` if the environment contains no key."""
    global _expected
    _expected = _digest(os.environ.pop(KEY_VARIABLE).encode())


class RequireKey:
    """ASGI middleware that responds with status 401 to a request without this process's key. Call `load_key` first."""

    def __init__(self, app: _App) -> None:
        if not _expected:
            raise RuntimeError(f"{KEY_VARIABLE} is not set: without a key, any local user could replace the server's weights")
        self._app, self._expected = app, _expected

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            content = [(b"content-type", b"application/json"), (b"connection", b"close")]
            body = b'{"error": "the server key is missing or wrong: send the key of the run that started this server"}'
            await send({"type": "http.response.start", "status": 401, "headers": content})
            await send({"type": "http.response.body", "body": body})

    def _allowed(self, scope: _Scope) -> bool:
        if (scope.get("method"), scope["path"]) == _OPEN:
            return True
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(key), self._expected)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


NAME = "server.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Address and key of a running server; `start` identifies this start of the server."""

    url: str
    key: str
    start: int


def announce_server(run_dir: Path, url: str, *, key: str) -> None:
    """Records that a new server at `url` accepts requests with `key`. Only the run's user can read the file."""
    write_atomically(run_dir / NAME, json.dumps({"url": url, "key": key, "start": time.time_ns()}), private=True)


def withdraw_server(run_dir: Path) -> None:
    """Records that no server is running."""
    (run_dir / NAME).unlink(missing_ok=True)


def announced_server(run_dir: Path) -> ServerAddress | None:
    """Returns the current server, or None if no server is running."""
    try:
        record = json.loads((run_dir / NAME).read_text())
    except FileNotFoundError:
        return None
    return ServerAddress(url=str(record["url"]), key=str(record["key"]), start=int(record["start"]))

"""Requests from a host to the driver of a run, for use in threads. A request is repeated until its deadline if the driver does not respond.

A response may be lost, so the driver's routes ensure that a repeated request has the same effect as a single request.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from agentrl.errors import DiskFull, InfrastructureError, StoreError, UserError

KEY_VARIABLE = "AGENTRL_DRIVER_KEY"
"""Environment variable that contains the key of a part on another host. The part removes the variable before it starts other programs."""
MAX_ANSWER = 1 << 30
"""Maximum bytes of a response."""
_SILENCE_S = 30.0  # seconds without a byte after which a connection is closed
_BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0)
_PIECE = 1 << 20
_TEXT = 2000  # characters of an error message


class LinkLost(InfrastructureError):
    """The driver does not respond."""


class SessionEnded(InfrastructureError):
    """The driver restarted this part, so this process must exit."""


class NotFound(LookupError):
    """The driver, or another host, does not have the requested file or folder."""


@dataclass(slots=True, eq=False)
class Link:
    """Requests to one server, over one connection per thread. Raises `UserError` if `url` is not a valid address.

    Args:
        url: address of the server: `http://HOST:PORT`.
        what: name of the server in error messages.
    """

    url: str
    key: str = field(repr=False)
    what: str = "the driver"
    silence_s: float = _SILENCE_S
    _local: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme == "http" and parts.hostname and not parts.path.strip("/") and parts.port != 0
        except ValueError:  # an invalid port or IPv6 address
            is_address = False
        if not is_address:
            raise UserError(f"{self.url[:200]!a} is not the address of {self.what}", fix="give it as http://HOST:PORT")

    def call(self, method: str, path: str, body: bytes = b"", *, timeout_s: float = 60.0) -> bytes:
        """Sends a request and returns the content of the response. Repeats the request for up to `timeout_s` seconds if the server does not
        respond.

        Raises `LinkLost` if the server does not respond in time, `NotFound` for status 404, `SessionEnded` for 409, `DiskFull` for 507,
        `StoreError` for 500, and `UserError` if the server rejects the request.
        """
        deadline, tries, reason = time.monotonic() + timeout_s, 0, ""
        while True:
            try:
                status, answer = self.request(method, path, body, timeout_s=max(0.1, deadline - time.monotonic()))
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if status != 503:
                    return self._checked(status, answer, path)
                reason = _message(answer)
            pause = _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]
            if time.monotonic() + pause >= deadline:
                raise LinkLost(f"{self.what} at {self.url} did not answer {path} within {timeout_s:.3g} s: {reason[:_TEXT]}")
            tries += 1
            time.sleep(pause)

    def json(self, method: str, path: str, data: Any = None, *, timeout_s: float = 60.0) -> Any:
        """Sends a request with a JSON body and returns the JSON in the response. If `data` is None, sends no body. Raises the errors of
        `call`, and `LinkLost` if the response is not JSON."""
        answer = self.call(method, path, b"" if data is None else json.dumps(data).encode(), timeout_s=timeout_s)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise LinkLost(f"{self.what} at {self.url} did not answer {path} with JSON") from None

    def request(self, method: str, path: str, body: bytes = b"", *, timeout_s: float, most: int = MAX_ANSWER) -> tuple[int, bytes]:
        """Sends one request and returns the status and the content of the response. `most`: maximum bytes of content.

        Raises `OSError` or `http.client.HTTPException` if the request fails or the response is longer.
        """
        deadline = time.monotonic() + timeout_s
        connection = self._connection(min(self.silence_s, timeout_s))
        try:
            headers = {"authorization": f"Bearer {self.key}", **({"content-type": "application/octet-stream"} if body else {})}
            connection.request(method, quote(path, safe="/?=&"), body or None, headers)
            answer = connection.getresponse()
            content = _content(answer, deadline, most)
        except BaseException:
            self.close()
            raise
        if answer.will_close:
            self.close()
        return answer.status, content

    def close(self) -> None:
        """Closes this thread's connection."""
        connection, self._local.connection = getattr(self._local, "connection", None), None
        if connection is not None:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None or connection.sock is None:
            parts = urlsplit(self.url)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.connection = connection
        elif _is_closed(connection.sock):
            self.close()
            return self._connection(timeout_s)
        connection.sock.settimeout(timeout_s)
        return connection

    def _checked(self, status: int, answer: bytes, path: str) -> bytes:
        if status in (200, 204):
            return answer
        message = _message(answer)
        if status == 404:
            raise NotFound(message)
        if status == 409:
            raise SessionEnded(f"{self.what} has replaced this process: {message}")
        if status == 507:
            raise DiskFull(f"{self.what}: {message}")
        if status == 500:
            raise StoreError(message)
        if status == 401:
            fix = "copy workers.json from the run folder again: each start of the driver creates a new key"
            raise UserError(f"{self.what} at {self.url} rejected the key", fix=fix)
        raise UserError(f"{self.what} rejected {path} with status {status}: {message}", fix="use the same agentrl version on every host")


def take_key() -> str:
    """Returns the key of this part, and removes it from the environment, so that child processes do not inherit it. Raises `UserError` if
    the environment variable is not set."""
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        raise UserError(f"{KEY_VARIABLE} is not set", fix="set it to the key in workers.json of the run folder, or give --key-file")
    return key


def _content(answer: http.client.HTTPResponse, deadline: float, most: int) -> bytes:
    """Returns the content of a response. Raises `TimeoutError` at the deadline, even if bytes are still arriving."""
    if (answer.length or 0) > most:
        raise http.client.HTTPException(f"the response has {answer.length} bytes; the maximum is {most}")
    pieces, size = [], 0
    while piece := answer.read1(_PIECE):
        size += len(piece)
        if size > most:
            raise http.client.HTTPException(f"the response has more than {most} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the response was not complete in time")
        pieces.append(piece)
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    answer.close()  # the connection stays open for the next request
    return b"".join(pieces)


def _is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed an idle connection, or sent data that belongs to no request."""
    try:
        sock.setblocking(False)
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])[:_TEXT]
    except (ValueError, LookupError, TypeError, RecursionError):
        return answer[:_TEXT].decode(errors="replace")

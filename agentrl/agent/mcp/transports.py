"""Transports to an MCP server: in the episode's sandbox, as a program on this machine, or over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.agent.inside import stdio
from agentrl.agent.mcp.messages import REVISIONS, ServerError
from agentrl.base import secrets, user_code, web
from agentrl.base.processes import kill_marked
from agentrl.base.user_code import clean
from agentrl.protocols import Sandbox

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 1 << 20
"""Maximum bytes in one response. The total output up to the response may have four times as many bytes."""
SESSION = "mcp"
"""The sandbox session in which the server programs run."""
_REQUEST_ERRORS = (400, 413, 414, 415, 422, 431)  # HTTP status codes that indicate a fault in the request
_SLACK_S = 5.0  # additional time for a sandbox call, beyond the program's time
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")  # passed on from this process's environment; none is a secret
_STDERR_CHARS = 300
_MAX_SMALL_PIECES = 4096  # maximum number in one response over HTTP
_FULL_PIECE = 64  # minimum bytes of a piece that is not small
_MAX_SERVER_REQUESTS = 16  # maximum requests from a server before it responds
_MARK = "AGENTRL_MCP"
"""Environment variable that marks a program on this machine and all processes that it starts."""

ENDINGS: Mapping[str, str] = {
    "ended": "mcp_died",
    "gone": "mcp_died",
    "unstartable": "mcp_unstartable",
    "late": "mcp_timeout",
    "flood": "mcp_flood",
    "garbage": "mcp_garbage",
}
"""How a request ended without a response -> kind of the recorded failure."""


class Unanswered(Exception):
    """A server sent no valid response. The server must be restarted before the next request. `ending` is a key of `ENDINGS`."""

    def __init__(self, ending: str, text: str) -> None:
        super().__init__(text)
        self.ending = ending


class Transport(Protocol):
    """A connection to one server. The first request starts the server."""

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        """Sends messages and returns the line with the response to request `until`; an empty line if `until` is None. If `begin` is set,
        starts or restarts the server first.

        Raises:
            Unanswered: the server does not start or has ended, or there is no valid response within `timeout_s`.
            ServerError: the transport rejected the request.
        """

    async def close(self) -> None:
        """Closes the connection, and stops the server if this transport started it."""


@dataclass(slots=True)
class SandboxTransport:
    """A program in a session of the episode's sandbox. The agent can kill, read and replace the program, so its output is treated as the
    agent's."""

    name: str
    argv: tuple[str, ...]

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        """See `Transport.request`."""
        assert sandbox is not None, "needs_sandbox is True"
        call = (self.name, list(self.argv), begin, list(messages), until, timeout_s, MAX_BYTES)
        missing = f"exec({_source()!r}, globals())" if begin else 'print(\'{"outcome": "gone"}\')\n    call = None'
        code = f"call = {call!r}\nif 'request_program' not in globals():\n    {missing}\nif call:\n    request_program(*call)\n"
        try:
            result = await sandbox.python(code, timeout_s=timeout_s + _SLACK_S, output_bytes=4 * MAX_BYTES, session=SESSION)
        except ValueError as error:  # the sandbox has no session left
            raise Unanswered("unstartable", user_code.error_text(error, 200)) from None
        if result.exit_code is None:
            raise Unanswered("ended", "its session in the sandbox was ended")
        head, _, rest = result.stdout.partition("\n")
        try:
            header = json.loads(head)
            outcome, exit_code, stderr = header["outcome"], header.get("exit"), header.get("stderr")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise Unanswered("garbage", "its session in the sandbox was tampered with") from None
        if outcome == "answer" and not result.truncated:
            return rest.strip("\n").encode("utf-8", "replace")
        raise _unanswered(outcome if isinstance(outcome, str) and outcome in ENDINGS else "garbage", exit_code, stderr, timeout_s)

    async def close(self) -> None:
        """Does nothing, because the program stops with its sandbox."""


class StdioTransport:
    """A program on this machine, one per episode. The program runs as the run's user, without the secrets in the run's environment."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._mark = os.urandom(16).hex()
        self._argv, self._env, self._cwd = tuple(argv), {**environment, **env, _MARK: self._mark}, str(cwd)
        self._program: stdio.StdioProgram | None = None
        self._started = False

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        """See `Transport.request`."""
        if begin:
            await self.close()
            self._started = True
            try:
                self._program = stdio.StdioProgram(self._argv, self._env, self._cwd)
            except (OSError, ValueError) as error:
                raise Unanswered("unstartable", user_code.describe_error(error)) from None
        program = self._program
        if program is None:
            raise Unanswered("gone", "it has ended")
        try:
            outcome, answer = await user_code.run_in_thread(
                lambda: program.request(messages, until, timeout_s, MAX_BYTES), what=f"MCP server {self._argv[0]}"
            )
        except (OSError, ValueError):  # closed by another call
            raise Unanswered("gone", "it was closed") from None
        if outcome == "answer":
            return answer
        self._program = None
        raise _unanswered(outcome, program.process.returncode, program.stderr_tail.decode("utf-8", "replace"), timeout_s)

    async def close(self) -> None:
        """Kills the program with its process group, and the processes that it started outside the group, such as daemons."""
        program, self._program = self._program, None

        def end() -> None:
            if program is not None:
                program.close()
            kill_marked(_MARK, self._mark)

        if program is not None or self._started:
            self._started = False
            await user_code.run_in_thread(end, what="ending an MCP server")


class HTTPTransport:
    """A server at a URL, over the protocol's streamable HTTP transport, with one session per episode."""

    def __init__(self, url: str, *, key_env: str) -> None:
        self._url = url
        self._key_env = key_env
        self._client: httpx.AsyncClient | None = None
        self._session = ""
        self._revision = ""  # protocol revision; empty until the server has chosen it

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        """See `Transport.request`."""
        import httpx

        if begin:
            await self.close()
            verify = web.certificates() if self._url.startswith("https:") else False
            self._client = httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=timeout_s, verify=verify)
        if self._client is None:
            raise Unanswered("gone", "the connection is closed")
        try:
            async with asyncio.timeout(timeout_s):
                answers = [await self._post(self._client, message, until) for message in messages]
        except TimeoutError:
            raise Unanswered("late", f"no answer within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError) as error:
            ending = "late" if isinstance(error, httpx.TimeoutException) else "ended"
            raise Unanswered(ending, user_code.describe_error(error, 200)) from None
        return answers[-1]

    async def _post(self, client: httpx.AsyncClient, message: str, until: int | None) -> bytes:
        headers = self._headers()
        async with client.stream("POST", self._url, content=message.encode(), headers=headers) as response:
            if not self._session:
                self._session = clean(response.headers.get("mcp-session-id", ""), 200)
            if response.status_code >= 400:
                raise _by_status(response.status_code, in_session=bool(headers.get("mcp-session-id")))
            if "id" not in json.loads(message):
                return b""
            answer = await self._answer(client, response, until)
        if not self._revision:
            self._revision = _chosen_revision(answer)
        return answer

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream", "accept-encoding": "identity"}
        if self._session:
            headers["mcp-session-id"] = self._session
        if self._revision:
            headers["mcp-protocol-version"] = self._revision
        if self._key_env:
            headers["authorization"] = f"Bearer {secrets.read_secret(f'env:{self._key_env}')}"
        return headers

    async def _answer(self, client: httpx.AsyncClient, response: httpx.Response, until: int | None) -> bytes:
        """Returns the message with the response to request `until`. Answers requests from the server that arrive before this message.

        Raises `Unanswered` if the response has too many bytes or pieces, or is invalid. Other asyncio tasks may run between two pieces.
        """
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/json", "text/event-stream"):
            raise Unanswered("garbage", f"its answer has type {clean(kind, 60) or 'none'}: neither JSON nor a stream of events")
        is_stream = kind == "text/event-stream"
        stream, body, taken, pieces, requests = web.Events(), bytearray(), 0, 0, 0
        async for piece in response.aiter_raw():
            taken, pieces = taken + len(piece), pieces + 1
            if (stream.held if is_stream else len(body)) + len(piece) > MAX_BYTES or taken > 4 * MAX_BYTES:
                raise Unanswered("flood", f"more than {MAX_BYTES} bytes")
            if pieces > _MAX_SMALL_PIECES + taken // _FULL_PIECE:
                raise Unanswered("garbage", f"its answer has too many pieces, of {taken // pieces} bytes on average")
            if not is_stream:
                body += piece
            for data in (data for _, data in stream.feed(piece) if data) if is_stream else ():
                if stdio.is_answer(data, until):
                    return data
                if not _is_json(data):
                    raise Unanswered("garbage", "an event of its answer is not JSON")
                if (reply := stdio.reply_to(data)) is not None and (requests := requests + 1) <= _MAX_SERVER_REQUESTS:
                    await self._reply(client, reply)
            await asyncio.sleep(0)
        if not is_stream and stdio.is_answer(bytes(body), until):
            return bytes(body)
        raise Unanswered("garbage", "its answer is missing or belongs to another request")

    async def _reply(self, client: httpx.AsyncClient, message: bytes) -> None:
        """Answers a request from the server, without retries."""
        import httpx

        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", self._url, content=message, headers=self._headers()):
                pass

    async def close(self) -> None:
        """Ends the session and closes the connection."""
        client, self._client = self._client, None
        if client is not None and self._session:
            with contextlib.suppress(Exception):  # the connection is closed in any case
                await client.delete(self._url, headers=self._headers(), timeout=2.0)
        self._session, self._revision = "", ""
        if client is not None:
            await client.aclose()


def _by_status(status: int, *, in_session: bool) -> Unanswered | ServerError:
    """Returns the error for an HTTP status of 400 or more. Most such statuses indicate a fault of the server, or a wrong address or key in
    the recipe."""
    text = f"it answered with status {status}"
    if status == 404 and in_session:  # as the MCP specification defines
        return Unanswered("gone", "its session has ended")
    return ServerError(text) if status in _REQUEST_ERRORS else Unanswered("ended", text)


def _chosen_revision(answer: bytes) -> str:
    """Returns the protocol revision in the response to `initialize`; empty if the revision is not supported."""
    result = stdio.parse_object(answer).get("result")
    revision = result.get("protocolVersion") if isinstance(result, dict) else None
    return revision if revision in REVISIONS else ""


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _unanswered(ending: str, exit_code: Any, stderr: Any, timeout_s: float) -> Unanswered:
    """Returns the error for a request that ended without a response, with the program's exit code and the end of its stderr."""
    texts = {
        "late": f"it gave no answer within {timeout_s:g} s, and was ended",
        "flood": f"its output has more than {MAX_BYTES} bytes, and it was ended",
        "unstartable": "it cannot be started",
        "garbage": "its session in the sandbox was tampered with",
    }
    text = texts.get(ending, "it has ended")
    if isinstance(exit_code, int) and ending in ("ended", "gone"):
        text += f" (exit code {exit_code})"
    tail = secrets.redact(clean(stderr, 2 * _STDERR_CHARS)).strip()[-_STDERR_CHARS:]
    return Unanswered(ending, f"{text}: {tail}" if tail else text)


@cache
def _source() -> str:
    return Path(stdio.__file__).read_text(encoding="utf-8")

"""Where a server runs, and how it is asked there: in the episode's sandbox, as a program on this machine, or over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.agent.inside import stdio as inside_line
from agentrl.agent.mcp.messages import REVISIONS, ServerError, clean
from agentrl.base import secrets, user_code
from agentrl.base.processes import kill_marked
from agentrl.protocols import Sandbox

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 1 << 20
"""Of one answer; four times as many of all that a server says before it."""
SESSION = "mcp"
"""The sandbox session in which the programs of servers are kept."""
_OF_THE_REQUEST = (400, 413, 414, 415, 422, 431)
_SLACK_S = 5.0  # that a sandbox may take beyond the time that the program is given
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")  # of this process's environment; no key of anybody's is among them
_MOST_STDERR = 300
_MOST_PIECES = 4096  # small pieces of one answer over HTTP
_FULL_PIECE = 64  # bytes of a piece that is not small
_MOST_REQUESTS = 16  # requests of a server while it answers one question
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
"""How a question can end without an answer -> the kind of the failure that is recorded."""


class Unanswered(Exception):
    """A server gave no answer; it is not there any more, or cannot be asked again before it is started anew."""

    def __init__(self, ending: str, text: str) -> None:
        super().__init__(text)
        self.ending = ending


class Transport(Protocol):
    """One connection to one server, which is started by the first question."""

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        """Sends messages and returns the line that answers request `until`. Raises `Unanswered`, and `ServerError` for a request that the
        transport rejects.

        Args:
            begin: start the server anew.
        """
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class SandboxTransport:
    """A program in the episode's sandbox, held by a session there. It is the agent's neighbour, who may kill it, read it and take its
    place: nothing that it says is more than the agent could have said."""

    name: str
    argv: tuple[str, ...]

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        assert sandbox is not None, "needs_sandbox is True"
        call = (self.name, list(self.argv), begin, list(messages), until, timeout_s, MAX_BYTES)
        known = "" if begin else f"if 'talk' not in globals():\n    print('{{\"outcome\": \"gone\"}}')\nelse:\n    talk(*{call!r})\n"
        code = known or f"if 'talk' not in globals():\n    exec({_source()!r}, globals())\ntalk(*{call!r})\n"
        try:
            ran = await sandbox.python(code, timeout_s=timeout_s + _SLACK_S, output_bytes=4 * MAX_BYTES, session=SESSION)
        except ValueError as error:  # the sandbox has no session left
            raise Unanswered("unstartable", user_code.error_text(error, 200)) from None
        if ran.exit_code is None:
            raise Unanswered("ended", "its session in the sandbox was ended")
        head, _, rest = ran.stdout.partition("\n")
        try:
            header = json.loads(head)
            outcome, exit_code, complained = header["outcome"], header.get("exit"), header.get("stderr")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise Unanswered("garbage", "its session in the sandbox was tampered with") from None
        if outcome == "answer" and not ran.truncated:
            return rest.strip("\n").encode("utf-8", "replace")
        ending = outcome if isinstance(outcome, str) and outcome in ENDINGS else "garbage"
        raise _unanswered(ending, exit_code, complained, timeout_s)

    async def close(self) -> None:
        """It ends with its sandbox."""


class StdioTransport:
    """A program on this machine, one for each episode, with the rights of the run and none of its environment's secrets."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._mark = os.urandom(16).hex()
        self._argv, self._env, self._cwd = tuple(argv), {**kept, **env, _MARK: self._mark}, str(cwd)
        self._line: inside_line.Line | None = None
        self._started = False

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        if begin:
            await self.close()
            self._started = True
            try:
                self._line = inside_line.Line(self._argv, self._env, self._cwd)
            except (OSError, ValueError) as error:
                raise Unanswered("unstartable", user_code.describe_error(error)) from None
        line = self._line
        if line is None:
            raise Unanswered("gone", "it has ended")
        try:
            outcome, answer = await user_code.run_in_thread(
                lambda: line.ask(messages, until, timeout_s, MAX_BYTES), what=f"MCP server {self._argv[0]}"
            )
        except (OSError, ValueError):  # closed meanwhile
            raise Unanswered("gone", "it has been ended") from None
        if outcome == "answer":
            return answer
        self._line = None
        raise _unanswered(outcome, line.process.returncode, line.complained.decode("utf-8", "replace"), timeout_s)

    async def close(self) -> None:
        line, self._line = self._line, None
        if line is not None or self._started:
            self._started = False
            await user_code.run_in_thread(lambda: self._end(line), what="ending an MCP server")

    def _end(self, line: inside_line.Line | None) -> None:
        """Ends the program with its process group and the processes that it started outside the group, such as daemons."""
        if line is not None:
            line.close()
        kill_marked(_MARK, self._mark)


class HTTPTransport:
    """A server at a URL, by the transport that the protocol calls streamable HTTP; a session of its own for each episode."""

    def __init__(self, url: str, *, key_env: str) -> None:
        self._url = url
        self._key_env = key_env
        self._client: httpx.AsyncClient | None = None
        self._session = ""
        self._revision = ""  # of the protocol, once the server has chosen it

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        import httpx

        if begin:
            await self.close()
            self._client = httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=timeout_s, verify=_trusted(self._url))
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
            self._revision = _chosen(answer)
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
        """The message that answers request `until`. Answers requests of the server that arrive before it.

        The number of pieces is bounded as well as the number of bytes, and other tasks may run between two pieces.
        """
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/json", "text/event-stream"):
            raise Unanswered("garbage", f"its answer has type {clean(kind, 60) or 'none'}: neither JSON nor a stream of events")
        stream, body, taken, pieces, asked = Events(), bytearray(), 0, 0, 0
        async for piece in response.aiter_raw():
            taken, pieces = taken + len(piece), pieces + 1
            held = stream.held if kind == "text/event-stream" else len(body)
            if held + len(piece) > MAX_BYTES or taken > 4 * MAX_BYTES:
                raise Unanswered("flood", f"more than {MAX_BYTES} bytes")
            if pieces > _MOST_PIECES + taken // _FULL_PIECE:
                raise Unanswered("garbage", f"its answer comes in too many pieces, of {taken // pieces} bytes on average")
            if kind == "application/json":
                body += piece
            for data in stream.feed(piece) if kind == "text/event-stream" else ():
                if _answers(data, until):
                    return data
                if not _is_json(data):
                    raise Unanswered("garbage", "an event of its answer is not JSON")
                if (reply := inside_line.reply_to(data)) is not None and (asked := asked + 1) <= _MOST_REQUESTS:
                    await self._reply(client, reply)
            await asyncio.sleep(0)
        if kind == "application/json" and _answers(bytes(body), until):
            return bytes(body)
        raise Unanswered("garbage", "its answer is missing or belongs to another request")

    async def _reply(self, client: httpx.AsyncClient, message: bytes) -> None:
        """Sends an answer to a request of the server. A server that rejects it gets no other."""
        import httpx

        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", self._url, content=message, headers=self._headers()):
                pass

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._session:
            with contextlib.suppress(Exception):  # whatever it is, the connection ends
                await client.delete(self._url, headers=self._headers(), timeout=2.0)
        self._session, self._revision = "", ""
        if client is not None:
            await client.aclose()


def _by_status(status: int, *, in_session: bool) -> Unanswered | ServerError:
    """The error for an HTTP status of 400 or more. Few of them are the request's fault: address and key come from the recipe."""
    text = f"it answered with status {status}"
    if status == 404 and in_session:  # as the MCP specification defines
        return Unanswered("gone", "its session has ended")
    return ServerError(text) if status in _OF_THE_REQUEST else Unanswered("ended", text)


def _trusted(url: str) -> ssl.SSLContext | bool:
    """Whose certificates are believed; reading them takes longer than most calls."""
    return _certificates() if url.startswith("https:") else False


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


class Events:
    """Splits a stream into complete events. Takes time proportional to its input, for pieces of any size."""

    def __init__(self) -> None:
        self._begun = bytearray()  # bytes of an incomplete event

    @property
    def held(self) -> int:
        return len(self._begun)

    def feed(self, piece: bytes) -> list[bytes]:
        """Yields the data of each event that ends in this piece. Skips events without data."""
        seen = max(0, len(self._begun) - 3)
        self._begun += piece
        if b"\n\n" not in self._begun[seen:].replace(b"\r\n", b"\n"):
            return []
        *events, rest = bytes(self._begun).replace(b"\r\n", b"\n").split(b"\n\n")
        self._begun = bytearray(rest)
        return [data for event in events if event and (data := _data(event))]


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))


def _chosen(answer: bytes) -> str:
    """The revision of the protocol in the answer to `initialize`; empty if it is not supported."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        revision = json.loads(answer).get("result", {}).get("protocolVersion")
        return revision if revision in REVISIONS else ""
    return ""


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _answers(data: bytes, until: int | None) -> bool:
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "method" not in value and value.get("id") == until


def _unanswered(ending: str, exit_code: Any, complained: Any, timeout_s: float) -> Unanswered:
    texts = {
        "late": f"it gave no answer within {timeout_s:g} s, and was ended",
        "flood": f"it said more than {MAX_BYTES} bytes, and was ended",
        "unstartable": "it cannot be started",
        "garbage": "its session in the sandbox was tampered with",
    }
    text = texts.get(ending, "it has ended")
    if isinstance(exit_code, int) and ending in ("ended", "gone"):
        text += f" (exit code {exit_code})"
    last = secrets.redact(clean(complained, 2 * _MOST_STDERR)).strip()[-_MOST_STDERR:]
    return Unanswered(ending, f"{text}: {last}" if last else text)


@cache
def _source() -> str:
    return (Path(inside_line.__file__)).read_text(encoding="utf-8")

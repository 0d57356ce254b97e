"""Remote environments: a `RemoteEnvironment` for each episode, and a `RemoteServer` for each server that this process uses.

For each kind of server, a subclass of `Session` implements the protocol (`openenv`, `ors`, `nemo_gym`). This module limits, counts and
closes the sessions of all kinds of servers. Every wait has a deadline. A request to a busy server is repeated after the wait that the
server requests. Any server error is an `EnvironmentFault`, never a score. A step is never repeated, because the server may have applied it.

A session counts as lost if the server does not confirm that it ended. If this process is killed, the kernel closes its connections. OpenEnv
servers then free their sessions immediately, ORS servers free them 15 minutes after the last request, and NeMo Gym servers keep them until
the servers exit.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentrl.base import secrets, web
from agentrl.base.backoff import backoff_s
from agentrl.base.tool_list import InvalidMessage, ListedTool, usable_tools
from agentrl.base.user_code import describe_error
from agentrl.environment.remote_http import Busy, HttpClient, Rejected, need
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, UserError
from agentrl.plugins.parts import environment_kind
from agentrl.plugins.references import resolve
from agentrl.records import EnvironmentSpec, Observation, Step, ToolCall

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 30.0
"""Seconds for closing one session."""
IDLE_S = 60.0
"""Maximum number of seconds without a request before a keep-alive request is sent for a session."""
_MAX_PINNED = 10_000
_WARN_EVERY_S = 60.0  # seconds between warnings that a server is busy or unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Options that all remote environments have. Raises `PluginError` if an option is invalid."""

    sessions: int = 64  # maximum number of concurrent sessions of this process
    wait_s: float = 300.0  # deadline for obtaining a session, including retries while the server is busy
    reset_s: float = 120.0  # deadline for opening a session, and also for its reset
    step_s: float = 120.0  # deadline for one action
    key: str = ""  # API key for the server; `env:NAME` in a recipe

    def __post_init__(self) -> None:
        for name in ("sessions", "wait_s", "reset_s", "step_s"):
            value, kinds = getattr(self, name), int if name == "sessions" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                raise PluginError(f"tasks.family.options.{name} must be a positive number, got {value!r}", fix=f"write {name}=60")
        if not isinstance(self.key, str) or not self.key.isprintable() or not self.key.isascii():
            raise PluginError("tasks.family.options.key cannot be sent in an HTTP header", fix="write key=env:NAME")

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[RemoteOptions, dict[str, Any]]:
        """Splits `options` into a `RemoteOptions` and the other options, which depend on the kind of server."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names}), {
            name: value for name, value in options.items() if name not in names
        }


class Session(abc.ABC):
    """One session at a server. Subclasses implement the server's protocol. Any exception other than `PolicyFault` ends the session.

    Args:
        server: the server of the session.
        spec: the task's environment.
        options: the options in `spec` that are not in `RemoteOptions`.
    """

    instructions = ""
    actions: Sequence[str] | Sequence[dict[str, Any]] | None = None
    ended = False  # whether no more requests are allowed, because the session was closed or is being closed
    takes_text = False  # whether an answer without a tool call is an action even if there are function schemas

    def __init__(self, server: RemoteServer, spec: EnvironmentSpec, options: Mapping[str, Any]) -> None:
        self.server, self.spec, self.options = server, spec, options
        self._rewarded = False

    async def open(self) -> None:
        """Opens the session and sets `instructions` and `actions`. Raises `Busy` if the server may accept the session later."""
        return None

    @abc.abstractmethod
    async def reset(self) -> Observation:
        """Returns the first observation."""

    @abc.abstractmethod
    async def step(self, action: str | ToolCall) -> Step:
        """Applies an action. Raises `PolicyFault` if the server rejects the action."""

    async def keep_alive(self) -> None:
        """Sends a request, so that the server does not end an idle session."""
        return None

    @abc.abstractmethod
    async def close(self) -> bool:
        """Ends the session at the server. Returns whether the server confirmed that the session ended."""

    def abort(self) -> None:
        """Drops the connection of the session if there is one."""
        return None

    def result(self, text: str, reward: Any, *, terminated: Any, truncated: bool = False, parts: Mapping[str, float] | None = None) -> Step:
        """Returns a step. A missing reward counts as 0. Raises `EnvironmentFault` if a value is invalid, or if the episode terminates and
        no step had a reward, because the server then returned no score."""
        where = f"the reward of {self.server.what}"
        if reward is not None:
            reward, self._rewarded = number(reward, where), True
        elif terminated and not self._rewarded:
            raise EnvironmentFault(f"{self.server.what} ended the episode without any reward")
        return Step(
            observation=Observation(text=text),
            reward=reward or 0.0,
            terminated=need(terminated, bool, f"the end of an episode of {self.server.what}"),
            truncated=truncated,
            parts=parts or {},
        )


class RemoteServer:
    """A server: its sessions, its connections, and the pause that it requested. Use a `RemoteServer` from only one event loop. The
    constructor raises `UserError` if the URL is invalid."""

    def __init__(self, kind: str, url: str, options: RemoteOptions) -> None:
        self.url, self.options = web.validate_url(url).rstrip("/"), options
        self.what = f"{kind} server {urlsplit(url).netloc}"
        self.opened = self.closed = self.lost = 0
        self.cache: dict[str, Any] = {}  # data about the server that its sessions share
        self.learning = asyncio.Lock()
        header = {"ors": "x-api-key"}.get(kind, "authorization")
        self.headers = {} if not options.key else {header: options.key if kind == "ors" else f"Bearer {options.key}"}
        self.http = HttpClient(self.url, self.what, connections=options.sessions + 8, headers=self.headers)
        self._limit, self._used = options.sessions, 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._resume_at, self._refused, self._warn_at = 0.0, 0, 0.0
        self._pinned: OrderedDict[str, str] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._used_at: dict[Session, float] = {}
        self._keeper: asyncio.Task[None] | None = None

    async def open(self, connect: Callable[[], Session]) -> RemoteEnvironment:
        """Returns an environment with an open session. Waits at most `wait_s` seconds for a free slot and for the server to accept a
        session, and then raises `EnvironmentFault`. Raises the errors of `call` if opening the session fails for any other reason."""
        until, tries, why = time.monotonic() + self.options.wait_s, 0, "it is busy"
        while (left := until - time.monotonic()) > 0:
            if (pause := self._resume_at - time.monotonic()) > 0:
                await asyncio.sleep(min(pause, left))
                continue
            await self._take_slot(until)
            tries, session, opened = tries + 1, connect(), False
            try:
                await self.call(session, "opening a session", session.open, self.options.reset_s)
                self._refused, opened = 0, True
            except Busy as busy:
                why = str(busy)
                self._pause(busy, tries)
            finally:
                if not opened:
                    await asyncio.shield(self._in_background(self._discard(session)))
            if opened:
                return self._environment(session)
        raise EnvironmentFault(
            f"{self.what} opened no session within {self.options.wait_s:g} s: {why}\n"
            "  fix: start it, set tasks.family.options.sessions to the number of sessions that it allows, or raise wait_s"
        )

    def _environment(self, session: Session) -> RemoteEnvironment:
        self.opened += 1
        self._used_at[session] = time.monotonic()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_alive())
        return RemoteEnvironment(self, session)

    async def call(self, session: Session, what: str, work: Callable[[], Awaitable[T]], limit_s: float) -> T:
        """Runs a request for a session and returns its result. Raises `EnvironmentFault` if the session has ended, or there is no valid
        response within `limit_s` seconds; a `PolicyFault` or `UserError` (such as `TaskError`) of `work` is raised unchanged."""
        if session.ended:  # otherwise `close` would end it, and count it, twice
            raise EnvironmentFault(f"{self.what}: {what} is not possible, because the session has ended")
        if session in self._used_at:  # only sessions that are open: `open` ends the others
            self._used_at[session] = time.monotonic()
        with self.faults(f"{what} (limit: {limit_s:g} s)"):
            async with asyncio.timeout(limit_s):
                return await work()

    @contextlib.contextmanager
    def faults(self, what: str) -> Iterator[None]:
        """Converts invalid responses, timeouts and connection errors to `EnvironmentFault`. Other errors are raised unchanged."""
        try:
            yield
        except TimeoutError as error:
            raise EnvironmentFault(f"{self.what} did not answer: {what}") from error
        except (ValueError, RecursionError, LookupError, OSError, InvalidMessage) as error:
            if isinstance(error, UserError):
                raise
            raise EnvironmentFault(f"{self.what}, {what}: {describe_error(error)}") from error

    async def end(self, session: Session) -> None:
        """Ends a session and frees its slot, even if the caller is cancelled. Counts the session as closed or lost. Idempotent."""
        if self._used_at.pop(session, None) is None:
            return
        session.ended = True
        await asyncio.shield(self._in_background(self._end(session)))

    def pin(self, what: str, value: Any) -> None:
        """Raises `EnvironmentFault` if a description differs from the first version that this process received. `what` identifies the
        description."""
        text = json.dumps(value, sort_keys=True)
        if self._pinned.setdefault(what, text) != text:
            raise EnvironmentFault(
                f"{self.what} changed {what} during the run\n  fix: restart the server in its previous state, or start a new run"
            )
        while len(self._pinned) > _MAX_PINNED:
            self._pinned.popitem(last=False)

    async def close(self) -> None:
        """Ends all sessions, closes the connections, and logs how many sessions were opened, closed and lost."""
        if self._keeper is not None:
            self._keeper.cancel()
        await asyncio.gather(*(self.end(session) for session in list(self._used_at)))
        if self._closing:
            await asyncio.wait(self._closing, timeout=2 * CLOSE_S)
        await self.http.close()
        level = logging.WARNING if self.lost else logging.INFO
        log.log(level, "%s: %d sessions opened, %d closed, %d lost", self.what, self.opened, self.closed, self.lost)

    def _pause(self, busy: Busy, tries: int) -> None:
        self._refused += 1
        if busy.most is not None and 0 < busy.most < self._limit:
            log.warning("%s allows %d sessions at once, so the run uses no more", self.what, busy.most)
            self._limit = busy.most
        if busy.most is not None and self._used > busy.most:  # this process fills the server: wait until one of its sessions ends
            return
        if time.monotonic() > self._warn_at:
            log.warning("%s; retrying for up to %g s", busy, self.options.wait_s)
            self._warn_at = time.monotonic() + _WARN_EVERY_S
        seconds = min(backoff_s(tries, busy.wait_s, refused=self._refused), self.options.wait_s)
        self._resume_at = max(self._resume_at, time.monotonic() + seconds)

    async def _end(self, session: Session) -> None:
        try:
            confirmed = await self._close(session)
        finally:
            self._free_slot()
        self.closed, self.lost = self.closed + confirmed, self.lost + (not confirmed)

    async def _discard(self, session: Session) -> None:
        """Ends a session that was not completely opened, and frees its slot."""
        try:
            await self._close(session)
        finally:
            self._free_slot()

    async def _close(self, session: Session) -> bool:
        """Closes a session. Returns whether the server confirmed that the session ended."""
        try:
            async with asyncio.timeout(CLOSE_S):
                with self.faults("closing a session"):
                    return await session.close()
        except (EnvironmentFault, TimeoutError) as error:
            log.debug("%s", error)
            return False
        finally:
            session.abort()

    def _in_background(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _take_slot(self, until: float) -> None:
        while self._used >= self._limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await turn
            except BaseException as error:
                if turn.done() and not turn.cancelled():  # the slot was offered to a caller that no longer waits
                    self._offer_slot()
                if not isinstance(error, TimeoutError):
                    raise
                raise EnvironmentFault(
                    f"{self.what}: no session became free within {self.options.wait_s:g} s; {self._used} are in use\n"
                    "  fix: lower rollout.concurrency, or raise tasks.family.options.sessions or wait_s"
                ) from None
            finally:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
        self._used += 1

    def _free_slot(self) -> None:
        self._used -= 1
        self._offer_slot()

    def _offer_slot(self) -> None:
        while self._waiting and self._used < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 2)
            idle = [session for session, used_at in self._used_at.items() if used_at < time.monotonic() - IDLE_S / 2]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S / 2):
                    await asyncio.gather(*(session.keep_alive() for session in idle), return_exceptions=True)


class RemoteEnvironment:
    """An `agentrl.protocols.Environment` with a session at a server. After any error of `reset` or `step` except `PolicyFault`, these
    methods raise `EnvironmentFault`."""

    def __init__(self, server: RemoteServer, session: Session) -> None:
        self.instructions, self.actions, self.takes_text = session.instructions, session.actions, session.takes_text
        self._server, self._session = server, session
        self._fault = ""

    async def reset(self) -> Observation:
        """Returns the first observation."""
        return await self._call("the reset", self._session.reset, self._server.options.reset_s)

    async def step(self, action: str | ToolCall) -> Step:
        """Applies an action. Raises `PolicyFault` if the server rejects the action, and the other errors of `RemoteServer.call`."""
        return await self._call("a step", lambda: self._session.step(action), self._server.options.step_s)

    async def close(self) -> None:
        """Ends the session. Idempotent."""
        await self._server.end(self._session)

    async def _call(self, what: str, work: Callable[[], Awaitable[T]], limit_s: float) -> T:
        if self._fault:
            raise EnvironmentFault(f"{what} is not possible after a fault of the session: {self._fault}")
        try:
            return await self._server.call(self._session, what, work, limit_s)
        except PolicyFault:
            raise
        except BaseException as error:  # including a cancellation of the request
            self._fault = describe_error(error)
            if isinstance(error, Busy | Rejected):
                raise EnvironmentFault(str(error)) from error
            raise


class RemoteOpener:
    """An `agentrl.protocols.EnvironmentOpener` for remote environments."""

    def __init__(self) -> None:
        self.servers: dict[str, RemoteServer] = {}

    async def open(self, spec: EnvironmentSpec) -> RemoteEnvironment:
        """Opens a session for an episode. The `RemoteOptions` of the first episode apply to all episodes with the same reference.

        Raises `EnvironmentFault` if the server opens no session, `TaskError` if the task cannot be played, and `UserError` if the URL or an
        option is invalid or a secret cannot be read.
        """
        (prefix, _, url), kind = spec.ref.partition(":"), environment_kind(spec.ref)
        assert kind is not None, "only remote environments have this opener"
        general, options = RemoteOptions.split(secrets.resolve_options(spec.options))
        if spec.ref not in self.servers:
            self.servers[spec.ref] = RemoteServer(prefix, url, general)
        server, connect = self.servers[spec.ref], resolve(kind.session)
        return await server.open(lambda: connect(server, spec, options))

    async def close(self) -> None:
        """Ends all sessions."""
        for server in self.servers.values():
            await server.close()


def number(value: Any, where: str) -> float:
    """Returns a value as a float. Raises `EnvironmentFault` if the value is not a finite number."""
    if not isinstance(value, int | float) or not abs(value) <= 1e300:
        raise EnvironmentFault(f"{where} is {str(value)[:80]!r}, not a finite number")
    return float(value)


def schemas_of(server: RemoteServer, listed: Any) -> list[dict[str, Any]]:
    """Returns the function schemas of the tools that a server lists: objects with a name, a description, and either input_schema or
    parameters. Unusable tools are excluded. Raises `EnvironmentFault` if `listed` is not a list, and the errors of `usable_tools`."""
    entries = [
        {**entry, "parameters": entry.get("parameters") or entry.get("input_schema") or {"type": "object"}}
        for entry in need(listed, list, f"the tools of {server.what}")
        if isinstance(entry, dict)
    ]
    tools: tuple[ListedTool, ...] = usable_tools(entries, ())
    return [dict(tool.schema) for tool in tools]

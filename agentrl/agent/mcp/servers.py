"""The servers of a run, and an episode's connection to one of them.

Blame if a server gives no answer:

- A server in the sandbox: always the policy, because the agent can kill the server and take its place.
- A server outside that does not start, offers other tools than at the start of the run, dies, does not answer in time, answers with
  nonsense, or reports an outage: the infrastructure, unless the episode provoked it (`agentrl.agent.outage_blame`).
- A wrong request, or an answer that is too long: the policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.agent.arguments import argument_errors, argument_example
from agentrl.agent.mcp import messages
from agentrl.agent.mcp.messages import InvalidMessage, ServerError
from agentrl.agent.mcp.tool_list import MAX_PAGES, MAX_TOOLS, ListedTool, tool_difference
from agentrl.agent.mcp.transports import ENDINGS, HTTPTransport, SandboxTransport, StdioTransport, Transport, Unanswered
from agentrl.agent.outage_blame import CallRecord
from agentrl.agent.tools import NO_BOUNDS, OUTAGE, Bounds, ToolFault, ToolOutcome
from agentrl.agent.wording import ToolWording
from agentrl.base import secrets, user_code
from agentrl.base.liveness import AnswerLiveness
from agentrl.base.outages import Outage, outage_phrase
from agentrl.config.tools import MCPConfig
from agentrl.errors import InfrastructureError, TaskError, UserError
from agentrl.protocols import Sandbox, ToolSource
from agentrl.records import Limits

MCP_PREFIX = "mcp:"
MOST_FAILURES = 3
"""Of one server in one episode; after them it is not started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server of a recipe (`tools.mcp`). `offers`: its tools at the start of the run, None before it. `excluded`: tools that are not
    offered, and the reason for each."""

    name: str
    config: MCPConfig
    root: Path  # of the project, where programs on this machine are started
    offers: tuple[ListedTool, ...] | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    live: AnswerLiveness | None = field(default=None, compare=False, repr=False)  # server outside the sandbox, for all episodes

    @property
    def in_sandbox(self) -> bool:
        return bool(self.config.command)

    def transport(self) -> Transport:
        if self.config.url:
            return HTTPTransport(self.config.url, key_env=self.config.key_env)
        if self.config.command:
            return SandboxTransport(self.name, self.config.command)
        return StdioTransport(
            self.config.host_command, {name: secrets.read_secret(where) for name, where in self.config.env.items()}, self.root
        )

    def check_secrets(self) -> None:
        """Raises `UserError` for a secret reference of the recipe that does not resolve."""
        references = {f"env.{name}": where for name, where in self.config.env.items()}
        references |= {"key_env": f"env:{self.config.key_env}"} if self.config.key_env else {}
        for key, where in references.items():
            try:
                secrets.read_secret(where)
            except UserError as error:
                raise UserError(f"tools.mcp.{self.name}.{key}: {error.message}", fix=error.fix) from None


class ServerConnection:
    """One episode's connection to a server: opened when first called, closed with the episode. Its state is that it was used."""

    def __init__(self, server: Server, *, restored: bool = False) -> None:
        self.server = server
        self.used = restored
        self._place = server.transport()
        self._open = False
        self._number = 0
        self._failures = 0
        self._given_up = ""
        self._lock = asyncio.Lock()

    async def state(self, *, timeout_s: float) -> Any:
        """What a server keeps is not in it: one that is started anew says so."""
        return {"used": self.used}

    async def close(self, *, timeout_s: float) -> None:
        what, since = f"closing MCP server {self.server.name}", user_code.cancellation_count()
        self._open = False
        try:
            await user_code.call_user_code(self._place.close, what=what, timeout_s=timeout_s)
        except BaseException as error:
            user_code.reraise_if_fatal(error, since)
            user_code.log_unexpected(what, error)

    async def call(self, offer: ListedTool, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        """Calls one of the server's tools. Raises `ToolFault`, and `InfrastructureError` if a server outside is not available at the first
        call of this episode."""
        if self.server.config.together:
            async with self._lock:
                note = await self._ready(sandbox)
            return await self._called(offer, arguments, sandbox, limits, note)
        async with self._lock:
            note = await self._ready(sandbox)
            try:
                return await self._called(offer, arguments, sandbox, limits, note)
            except _Gone:  # something else has ended it, such as a program's timeout: it was never asked
                self._open = False
                note = await self._ready(sandbox)
                return await self._called(offer, arguments, sandbox, limits, note)

    async def _ready(self, sandbox: Sandbox | None) -> str:
        """Sees to it that the server is there, and is the one that the run began with. What the agent is to be told of it."""
        if self._given_up:
            raise ToolFault("mcp_given_up", f"{self._given_up}; the server {self.server.name} is not asked again in this episode")
        if self._open:
            return ""
        before, outside = self.used, not self.server.in_sandbox
        try:
            listed = await self.list_tools(sandbox)
        except (Unanswered, InvalidMessage, ServerError) as error:
            if outside and not before:
                raise InfrastructureError(f"MCP server {self.server.name}: {error}") from None
            raise self._fault(error) from None
        if difference := tool_difference(self.server.offers or (), listed):
            text = f"it is not the server that the run began with: {difference}"
            if outside and not before:
                raise InfrastructureError(f"MCP server {self.server.name}: {text}")
            self._given_up = text
            raise ToolFault("mcp_changed", text, outage=Outage(text=f"MCP server {self.server.name}: {text}") if outside else None)
        self._open = True
        return f"note: the server {self.server.name} was started anew; what it kept is gone\n" if before else ""

    async def list_tools(self, sandbox: Sandbox | None) -> list[Any]:
        """Starts the server, shakes hands, and gives the tools that it says it has. Raises `Unanswered`, `InvalidMessage`,
        `ServerError`."""
        until = time.monotonic() + self.server.config.start_timeout_s
        self._number = 1
        answer = await self._place.request([messages.opening(1)], 1, begin=True, sandbox=sandbox, timeout_s=until - time.monotonic())
        messages.revision(messages.result(answer))
        first: list[str] = [messages.opened()]
        listed: list[Any] = []
        cursor: dict[str, str] = {}
        for _ in range(MAX_PAGES):
            self._number += 1
            asked = [*first, messages.request(self._number, "tools/list", cursor)]
            left = max(0.1, until - time.monotonic())
            page = messages.result(await self._place.request(asked, self._number, begin=False, sandbox=sandbox, timeout_s=left))
            tools, after = page.get("tools"), page.get("nextCursor")
            if not isinstance(tools, list):
                raise InvalidMessage("a list of tools that is none")
            listed += tools
            if len(listed) > 16 * MAX_TOOLS:
                raise InvalidMessage(f"more than {16 * MAX_TOOLS} tools")
            if not isinstance(after, str) or not after:
                return listed
            first, cursor = [], {"cursor": after}
        raise InvalidMessage(f"a list of tools of more than {MAX_PAGES} pages")

    async def _called(
        self, offer: ListedTool, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits, note: str
    ) -> ToolOutcome:
        self._number += 1
        number, first = self._number, not self.used
        asked = messages.request(number, "tools/call", {"name": offer.name, "arguments": dict(arguments)})
        self.used = True
        try:
            line = await self._asked(asked, number, sandbox, limits.tool_timeout_s)
            outcome = messages.outcome(messages.result(line), limits.tool_output_chars)
        except ServerError as error:
            if not self.server.in_sandbox and (error.internal or outage_phrase(str(error), arguments)):
                raise self._out(str(error)) from None
            return ToolOutcome(output=f"{note}error: {offer.name}: {error}", ok=False)
        except (Unanswered, InvalidMessage) as error:
            once_more = not first and not note and not self.server.config.together
            if isinstance(error, Unanswered) and error.ending == "gone" and once_more:
                raise _Gone from None
            raise self._fault(error) from None
        if not outcome.ok and not self.server.in_sandbox and outage_phrase(outcome.output, arguments):
            raise self._out(outcome.output)
        return replace(outcome, output=note + outcome.output)

    async def _asked(self, message: str, number: int, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        if (live := self.server.live) is None:
            return await self._place.request([message], number, begin=False, sandbox=sandbox, timeout_s=timeout_s)
        with live.question():
            started = time.monotonic()
            line = await self._place.request([message], number, begin=False, sandbox=sandbox, timeout_s=timeout_s)
            live.answered(time.monotonic() - started)
            return line

    def _out(self, text: str) -> ToolFault:
        """The fault for an outage that a server outside reports; the connection stays open."""
        return ToolFault(OUTAGE, text, outage=Outage(text=f"MCP server {self.server.name}: {text}"[:500]))

    def _fault(self, error: Exception) -> ToolFault:
        """Counts a failure, after which the next call starts the server anew, or does not."""
        self._open = False
        self.used = True
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self._given_up = f"it has failed {self._failures} times"
        kind = ENDINGS[error.ending] if isinstance(error, Unanswered) else "mcp_garbage"
        again = "" if self._given_up else "; the next call starts it anew"
        text, ending = f"the server {self.server.name} failed: {error}", getattr(error, "ending", "")
        outside = not self.server.in_sandbox and ending != "flood"
        return ToolFault(kind, f"{text}{again}", outage=Outage(text=text, late=ending == "late") if outside else None)


class _Gone(Exception):
    """The server had ended before it was asked."""


class ServerTool:
    """One tool of a server, in one episode."""

    bounds = NO_BOUNDS

    def __init__(self, offer: ListedTool, connection: ServerConnection) -> None:
        config = connection.server.config
        self.name, self.schema, self.needs_sandbox = offer.name, offer.schema, connection.server.in_sandbox
        self.together = config.together
        self.opening_s = config.start_timeout_s + user_code.GRACE_S  # of a call that starts the server
        self._offer = offer
        self._connection = connection

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        if wrong := argument_errors(self.schema, arguments):
            return ToolOutcome(output=f"error: {self.name}: {wrong}{argument_example(self.schema)}", ok=False)
        return await self._connection.call(self._offer, arguments, sandbox, limits)


@dataclass(slots=True, kw_only=True)
class RunTools:
    """An `agentrl.protocols.ToolSource`."""

    servers: Mapping[str, Server]
    bounds: Mapping[str, Bounds]
    words: Mapping[str, ToolWording] = field(default_factory=dict)
    record: CallRecord = field(default_factory=CallRecord, compare=False, repr=False)


NO_TOOLS = RunTools(servers={}, bounds={})


def named(run: ToolSource, name: str) -> tuple[Server, str]:
    """The server, and the one tool of it (empty: all), that `mcp:SERVER` or `mcp:SERVER/TOOL` stands for. Raises `TaskError`."""
    wanted, _, one = name.removeprefix(MCP_PREFIX).partition("/")
    if wanted not in run.servers:
        known = ", ".join(f"{MCP_PREFIX}{other}" for other in run.servers) or "none"
        raise TaskError(
            f"the tool {name!r} is of an MCP server that the recipe does not have",
            fix=f"declare it in the recipe, as tools.mcp.{wanted}; declared: {known}",
        )
    return run.servers[wanted], one


def offered(server: Server, one: str) -> Sequence[ListedTool]:
    """The tools of a server, or the one of that name; none while the run has not begun. Raises `TaskError`."""
    if server.offers is None:
        return ()
    found = [offer for offer in server.offers if not one or offer.name == one]
    if not found:
        has, reason = ", ".join(offer.name for offer in server.offers), server.excluded.get(one)
        why = f", which is excluded: {reason}" if reason else ""
        raise TaskError(f"the MCP server {server.name} offers no tool {one!r}{why}", fix=f"use one of {has}")
    return found

"""The MCP servers of a run, and an episode's connection to one of them.

If a server sends no valid response, the blame depends on the server and the cause:

- A server in the sandbox: the policy is blamed, because the agent can kill and replace the server.
- A server outside the sandbox that does not start, changes its tools during the run, exits, responds too late, sends an invalid response,
or reports an outage: the infrastructure is blamed, unless the episode provoked the failure (`agentrl.agent.outage_blame`).
- An invalid request, or a response that is too long: the policy is blamed.
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
from agentrl.agent.mcp.messages import ServerError
from agentrl.agent.mcp.transports import ENDINGS, HTTPTransport, SandboxTransport, StdioTransport, Transport, Unanswered
from agentrl.agent.outage_blame import CallRecord
from agentrl.agent.tools import NO_BOUNDS, OUTAGE, Bounds, ToolFault, ToolOutcome, ToolWording
from agentrl.base import secrets, user_code
from agentrl.base.liveness import AnswerLiveness
from agentrl.base.outages import Outage, outage_phrase
from agentrl.base.tool_list import MAX_PAGES, MAX_TOOLS, InvalidMessage, ListedTool, tool_difference
from agentrl.config.tools import MCPConfig
from agentrl.errors import InfrastructureError, TaskError, UserError
from agentrl.protocols import Sandbox, ToolSource
from agentrl.records import Limits

MCP_PREFIX = "mcp:"
START_TIMEOUT_S = 60.0
"""Maximum seconds to start a server and list its tools: enough for a package runner such as npx that downloads the program first."""
MAX_FAILURES = 3
"""Number of failures in one episode after which a server is not restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server from the recipe's section `mcp`."""

    name: str
    config: MCPConfig
    root: Path  # project root, the working directory of programs on this machine
    offers: tuple[ListedTool, ...] | None = None  # its tools at the start of the run; None before the start
    excluded: Mapping[str, str] = field(default_factory=dict)  # unusable tools, with the reason for each
    live: AnswerLiveness | None = field(
        default=None, compare=False, repr=False
    )  # liveness of a server outside the sandbox, shared by all episodes

    @property
    def in_sandbox(self) -> bool:
        """Whether the server runs in the episode's sandbox."""
        return bool(self.config.command)

    def transport(self) -> Transport:
        """Returns a new transport to the server. Raises `UserError` if a secret for a program on this machine does not resolve."""
        if self.config.url:
            return HTTPTransport(self.config.url, key_env=self.config.key_env)
        if self.config.command:
            return SandboxTransport(self.name, self.config.command)
        return StdioTransport(
            self.config.host_command, {name: secrets.read_secret(where) for name, where in self.config.env.items()}, self.root
        )

    def check_secrets(self) -> None:
        """Raises `UserError` if a secret reference in the server's configuration does not resolve."""
        references = {f"env.{name}": where for name, where in self.config.env.items()}
        references |= {"key_env": f"env:{self.config.key_env}"} if self.config.key_env else {}
        for key, where in references.items():
            try:
                secrets.read_secret(where)
            except UserError as error:
                raise UserError(f"mcp.{self.name}.{key}: {error.message}", fix=error.fix) from None


class ServerConnection:
    """One episode's connection to a server: opened by the first call, closed with the episode."""

    def __init__(self, server: Server, *, restored: bool = False) -> None:
        self.server = server
        self.used = restored
        self._transport = server.transport()
        self._open = False
        self._number = 0
        self._failures = 0
        self._given_up = ""
        self._lock = asyncio.Lock()

    async def state(self, *, timeout_s: float) -> Any:
        """Returns the state as JSON data: whether the server was used. A restarted server has lost its state, and the agent is notified."""
        return {"used": self.used}

    async def close(self, *, timeout_s: float) -> None:
        """Closes the connection. Logs errors."""
        self._open = False
        what = f"closing MCP server {self.server.name}"
        with user_code.logging_faults(what):
            await user_code.call_user_code(self._transport.close, what=what, timeout_s=timeout_s)

    async def call(self, offer: ListedTool, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        """Calls one of the server's tools.

        Raises:
            ToolFault: the server failed, reports an outage, changed its tools or has failed too often to be restarted.
            InfrastructureError: a server outside the sandbox does not start, or has changed its tools, at the first call in this episode.
        """
        if self.server.config.together:
            async with self._lock:
                note = await self._ready(sandbox)
            return await self._called(offer, arguments, sandbox, limits, note)
        async with self._lock:
            note = await self._ready(sandbox)
            try:
                return await self._called(offer, arguments, sandbox, limits, note)
            except _Gone:  # it had exited before this request, for example when a program timed out
                self._open = False
                note = await self._ready(sandbox)
                return await self._called(offer, arguments, sandbox, limits, note)

    async def _ready(self, sandbox: Sandbox | None) -> str:
        """Starts the server if necessary and checks that its tools are unchanged. Returns a note for the agent; empty unless the server was
        restarted."""
        if self._given_up:
            raise ToolFault("mcp_given_up", f"{self._given_up}; the server {self.server.name} is not used again in this episode")
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
            text = f"its tools have changed since the run started: {difference}"
            if outside and not before:
                raise InfrastructureError(f"MCP server {self.server.name}: {text}")
            self._given_up = text
            raise ToolFault("mcp_changed", text, outage=Outage(text=f"MCP server {self.server.name}: {text}") if outside else None)
        self._open = True
        return f"note: the server {self.server.name} was restarted; its state is lost\n" if before else ""

    async def list_tools(self, sandbox: Sandbox | None) -> list[Any]:
        """Starts the server, performs the handshake, and returns its tools as unchecked JSON values. Raises `Unanswered` if there is no
        response in time, `ServerError` if the response is an error, and `InvalidMessage` if it is invalid or lists too many tools."""
        until = time.monotonic() + START_TIMEOUT_S
        self._number = 1
        answer = await self._transport.request([messages.opening(1)], 1, begin=True, sandbox=sandbox, timeout_s=until - time.monotonic())
        messages.revision(messages.result(answer))
        first: list[str] = [messages.opened()]
        listed: list[Any] = []
        cursor: dict[str, str] = {}
        for _ in range(MAX_PAGES):
            self._number += 1
            requests = [*first, messages.request(self._number, "tools/list", cursor)]
            left = max(0.1, until - time.monotonic())
            page = messages.result(await self._transport.request(requests, self._number, begin=False, sandbox=sandbox, timeout_s=left))
            tools, after = page.get("tools"), page.get("nextCursor")
            if not isinstance(tools, list):
                raise InvalidMessage("a list of tools that is not a list")
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
        request = messages.request(number, "tools/call", {"name": offer.name, "arguments": dict(arguments)})
        self.used = True
        try:
            line = await self._requested(request, number, sandbox, limits.tool_timeout_s)
            outcome = messages.outcome(messages.result(line), limits.tool_output_chars)
        except ServerError as error:
            if not self.server.in_sandbox and (error.internal or outage_phrase(str(error), arguments)):
                raise self._out(str(error)) from None
            return ToolOutcome(output=f"{note}error: {offer.name}: {error}", ok=False)
        except (Unanswered, InvalidMessage) as error:
            retry = not first and not note and not self.server.config.together
            if isinstance(error, Unanswered) and error.ending == "gone" and retry:
                raise _Gone from None
            raise self._fault(error) from None
        if not outcome.ok and not self.server.in_sandbox and outage_phrase(outcome.output, arguments):
            raise self._out(outcome.output)
        return replace(outcome, output=note + outcome.output)

    async def _requested(self, message: str, number: int, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        if (live := self.server.live) is None:
            return await self._transport.request([message], number, begin=False, sandbox=sandbox, timeout_s=timeout_s)
        with live.question():
            started = time.monotonic()
            line = await self._transport.request([message], number, begin=False, sandbox=sandbox, timeout_s=timeout_s)
            live.answered(time.monotonic() - started)
            return line

    def _out(self, text: str) -> ToolFault:
        """Returns the fault for a call if the server reports an outage of something that it depends on. The connection stays open."""
        return ToolFault(OUTAGE, text, outage=Outage(text=f"MCP server {self.server.name}: {text}"[:500]))

    def _fault(self, error: Exception) -> ToolFault:
        """Returns the fault for a call if the server failed. The next call restarts the server unless it has failed `MAX_FAILURES`
        times."""
        self._open = False
        self.used = True
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._given_up = f"it has failed {self._failures} times"
        kind = ENDINGS[error.ending] if isinstance(error, Unanswered) else "mcp_garbage"
        restart = "" if self._given_up else "; the next call restarts it"
        text, ending = f"the server {self.server.name} failed: {error}", getattr(error, "ending", "")
        outside = not self.server.in_sandbox and ending != "flood"
        return ToolFault(kind, f"{text}{restart}", outage=Outage(text=text, late=ending == "late") if outside else None)


class _Gone(Exception):
    """The server had exited before the request was sent."""


class ServerTool:
    """One tool of a server, in one episode."""

    bounds = NO_BOUNDS

    def __init__(self, offer: ListedTool, connection: ServerConnection) -> None:
        config = connection.server.config
        self.name, self.schema, self.needs_sandbox = offer.name, offer.schema, connection.server.in_sandbox
        self.together = config.together
        self.opening_s = START_TIMEOUT_S + user_code.GRACE_S  # additional time for a call that starts the server
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


def find_tool(run: ToolSource, name: str) -> tuple[Server, str]:
    """Returns the server and the tool's name from `mcp:SERVER/TOOL`. For `mcp:SERVER`, the tool's name is empty and means all tools. Raises
    `TaskError` if the recipe does not declare the server."""
    server, _, tool = name.removeprefix(MCP_PREFIX).partition("/")
    if server not in run.servers:
        known = ", ".join(f"{MCP_PREFIX}{other}" for other in run.servers) or "none"
        raise TaskError(
            f"the tool {name!r} belongs to an MCP server that the recipe does not declare",
            fix=f"declare the server in the recipe as mcp.{server}; declared servers: {known}",
        )
    return run.servers[server], tool


def offered(server: Server, name: str) -> Sequence[ListedTool]:
    """Returns the tools of a server, or only the tool named `name` if `name` is not empty; no tools before the run starts. Raises
    `TaskError` if the server offers no such tool."""
    if server.offers is None:
        return ()
    tools = [tool for tool in server.offers if not name or tool.name == name]
    if not tools:
        reason = f": it is excluded ({server.excluded[name]})" if name in server.excluded else ""
        known = ", ".join(tool.name for tool in server.offers)
        raise TaskError(f"the MCP server {server.name} offers no tool {name!r}{reason}", fix=f"use one of {known}")
    return tools

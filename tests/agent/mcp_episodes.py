"""Episodes with the tools of an MCP server, and the program of a hostile server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.agent import load_tools
from agentrl.agent.invoke import CallResult, call_tool
from agentrl.agent.mcp.servers import RunTools, Server
from agentrl.agent.outage_blame import Caller, CallRecord
from agentrl.agent.tools import Bounds
from agentrl.records import Limits

HOSTILE = Path(__file__).with_name("hostile_mcp.py")
LIMITS = Limits(tool_timeout_s=5.0, tool_output_chars=400)


class Episode:
    """The tools of one MCP server, opened for one episode."""

    def __init__(
        self,
        server: Server,
        saved: Any = None,
        bounds: dict[str, Bounds] | None = None,
        *,
        record: CallRecord | None = None,
        attempt: str = "",
    ) -> None:
        self.record, self.attempt = record, attempt
        self.tools = load_tools((f"mcp:{server.name}",), saved, RunTools(servers={server.name: server}, bounds=bounds or {}))

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.tools.close(timeout_s=5.0)

    async def use(self, name: str, limits: Limits = LIMITS, **arguments: Any) -> CallResult:
        caller = Caller(attempt=self.attempt, task="t")
        return await call_tool(self.tools[name], arguments, None, limits, turn=1, record=self.record, caller=caller)

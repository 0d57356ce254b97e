"""Tools of MCP servers: in the episode's sandbox, on this machine, or over HTTP, where a recipe says so.

The protocol is spoken here (handshake, `tools/list`, `tools/call`, up to revision 2025-11-25), with every size, time and word of a server
bounded: it is hostile, like everything that comes back from where an agent acts.
"""

from agentrl.agent.mcp.servers import RunTools, Server, ServerTool
from agentrl.agent.mcp.tool_list import ListedTool

__all__ = ["ListedTool", "RunTools", "Server", "ServerTool"]

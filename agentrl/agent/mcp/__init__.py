"""Tools from MCP servers in the episode's sandbox, on this machine, or over HTTP, as the recipe configures.

The client supports the handshake, `tools/list` and `tools/call`, up to revision 2025-11-25. A server is untrusted: everything that it sends
is bounded in size and time, and its text is cleaned.
"""

from agentrl.agent.mcp.servers import RunTools, Server

__all__ = ["RunTools", "Server"]

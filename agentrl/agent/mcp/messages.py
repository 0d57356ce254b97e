"""The MCP messages that a client for tools needs: builds JSON-RPC lines and checks the responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.agent.inside.stdio import parse_object
from agentrl.agent.tools import ToolOutcome
from agentrl.base.tool_list import InvalidMessage
from agentrl.base.user_code import clean
from agentrl.records.images import MARK, REFERENCE

REVISIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
MAX_ITEMS = 64
"""Maximum number of content items in one result. Later items are only counted."""
_INTERNAL = (-32603, -32000, -32001)  # JSON-RPC's internal error; "connection closed" and "request timeout" of the MCP SDKs
_CLIENT = {"name": "agentrl", "version": "1"}


class ServerError(Exception):
    """The server responded with an error. `internal`: whether the error code indicates a fault of the server."""

    def __init__(self, text: str, *, internal: bool = False) -> None:
        super().__init__(text)
        self.internal = internal


def request(number: int, method: str, parameters: Mapping[str, Any]) -> str:
    """Returns the line for a request."""
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(parameters)})


def opening(number: int) -> str:
    """Returns the line for the `initialize` request."""
    return request(number, "initialize", {"protocolVersion": REVISIONS[0], "capabilities": {}, "clientInfo": _CLIENT})


def opened() -> str:
    """Returns the line for the `initialized` notification."""
    return json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"})


def result(line: bytes) -> dict[str, Any]:
    """Returns the result in a response. Raises `ServerError` if the response is an error, and `InvalidMessage` if the response is
    invalid."""
    answer = parse_object(line)
    if isinstance(answer.get("result"), dict):
        return dict(answer["result"])
    if isinstance(error := answer.get("error"), dict):
        raise ServerError(clean(error.get("message"), 500) or "an error without a message", internal=error.get("code") in _INTERNAL)
    raise InvalidMessage("an answer with neither a result nor an error")


def revision(answer: Mapping[str, Any]) -> str:
    """Returns the protocol revision that a server chose. Raises `InvalidMessage` if the revision is not supported, or if the server offers
    no tools."""
    chosen = answer.get("protocolVersion")
    if chosen not in REVISIONS:
        raise InvalidMessage(f"it requires revision {clean(chosen, 40)!r} of the protocol; supported: {', '.join(REVISIONS)}")
    capabilities = answer.get("capabilities")
    if not isinstance(capabilities, dict) or "tools" not in capabilities:
        raise InvalidMessage("it offers no tools")
    return str(chosen)


def outcome(answer: Mapping[str, Any], limit: int) -> ToolOutcome:
    """Returns the result of a `tools/call` as text, with at most `limit` characters per text item. Valid images become image references,
    and other content is described by its type and size. Structured content is shown as JSON only if there is no other content. Raises
    `InvalidMessage` if the content is not a list."""
    content, structured = answer.get("content", []), answer.get("structuredContent")
    if not isinstance(content, list):
        raise InvalidMessage("a result whose content is not a list")
    parts = [_piece(item, limit) for item in content[:MAX_ITEMS]]
    if len(content) > MAX_ITEMS:
        parts.append(f"... and {len(content) - MAX_ITEMS} more content items")
    if not parts and structured is not None:
        parts = [clean(json.dumps(structured, ensure_ascii=False), limit)]
    return ToolOutcome(output="\n".join(parts), ok=answer.get("isError") is not True)


def _piece(item: Any, limit: int) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "text":
        return clean(item.get("text"), limit)
    if kind in ("image", "audio"):
        data = item.get("data")
        if kind == "image" and REFERENCE.fullmatch(reference := f"{MARK}base64:{data}>"):
            return reference
        size = 3 * len(data) // 4 if isinstance(data, str) else 0
        return f"({kind}, {clean(item.get('mimeType'), 60) or 'of unknown type'}, {size} bytes, which cannot be shown)"
    if kind == "resource_link":
        return f"(link to {clean(item.get('uri'), 300)})"
    if kind == "resource":
        inner = item.get("resource")
        inner = inner if isinstance(inner, dict) else {}
        return clean(inner.get("text"), limit) if "text" in inner else f"(resource {clean(inner.get('uri'), 300)}, which cannot be shown)"
    return "(content of an unknown kind)"

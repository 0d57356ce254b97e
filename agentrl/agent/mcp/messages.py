"""The messages of MCP that a client of tools needs: JSON-RPC lines out, checked values in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.agent.tools import ToolOutcome
from agentrl.base.user_code import printable
from agentrl.records.fields import text as encodable

REVISIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
MAX_ITEMS = 64
"""Pieces of content that one result is read for."""
_INTERNAL = (-32603, -32000, -32001)  # JSON-RPC's internal error; connection closed and request timeout of the MCP SDKs
_CLIENT = {"name": "agentrl", "version": "1"}


class InvalidMessage(Exception):
    """What a server said is no answer; the text says why, printable and short."""


class ServerError(Exception):
    """The server answered with a protocol error, with its text. `internal`: the error code reports a fault of the server."""

    def __init__(self, text: str, *, internal: bool = False) -> None:
        super().__init__(text)
        self.internal = internal


def request(number: int, method: str, parameters: Mapping[str, Any]) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(parameters)})


def opening(number: int) -> str:
    return request(number, "initialize", {"protocolVersion": REVISIONS[0], "capabilities": {}, "clientInfo": _CLIENT})


def opened() -> str:
    return json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"})


def result(line: bytes) -> dict[str, Any]:
    """The result that a line holds. Raises `ServerError` for an error of the server's, `InvalidMessage` for what is neither."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidMessage("an answer that is no JSON") from None
    found = answer.get("result") if isinstance(answer, dict) else None
    if isinstance(found, dict):
        return found
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        raise ServerError(clean(error.get("message"), 500) or "an error without a message", internal=error.get("code") in _INTERNAL)
    raise InvalidMessage("an answer with neither a result nor an error")


def revision(answer: Mapping[str, Any]) -> str:
    """The revision that a server chose. Raises `InvalidMessage` for one that is not spoken here, and for a server without tools."""
    chosen = answer.get("protocolVersion")
    if chosen not in REVISIONS:
        raise InvalidMessage(f"it wants revision {clean(chosen, 40)!r} of the protocol; known here: {', '.join(REVISIONS)}")
    capabilities = answer.get("capabilities")
    if not isinstance(capabilities, dict) or "tools" not in capabilities:
        raise InvalidMessage("it offers no tools")
    return str(chosen)


def outcome(answer: Mapping[str, Any], limit: int) -> ToolOutcome:
    """What a `tools/call` gave, as text. Content that is no text is told of by kind and size; structured content alone is shown as JSON."""
    content, structured = answer.get("content", []), answer.get("structuredContent")
    if not isinstance(content, list):
        raise InvalidMessage("a result whose content is no list")
    parts = [_piece(item, limit) for item in content[:MAX_ITEMS]]
    if len(content) > MAX_ITEMS:
        parts.append(f"... and {len(content) - MAX_ITEMS} more pieces of content")
    if not parts and structured is not None:
        parts = [clean(json.dumps(structured, ensure_ascii=False), limit)]
    return ToolOutcome(output="\n".join(parts), ok=answer.get("isError") is not True)


def _piece(item: Any, limit: int) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "text":
        return clean(item.get("text"), limit)
    if kind in ("image", "audio"):
        data = item.get("data")
        size = 3 * len(data) // 4 if isinstance(data, str) else 0
        return f"({kind}, {clean(item.get('mimeType'), 60) or 'of unknown type'}, {size} bytes, which cannot be shown)"
    if kind == "resource_link":
        return f"(link to {clean(item.get('uri'), 300)})"
    if kind == "resource":
        inner = item.get("resource")
        inner = inner if isinstance(inner, dict) else {}
        return clean(inner.get("text"), limit) if "text" in inner else f"(resource {clean(inner.get('uri'), 300)}, which cannot be shown)"
    return "(content of an unknown kind)"


def clean(words: Any, limit: int) -> str:
    """Text without what a terminal would obey: head and tail of at most about `limit` characters; empty for what is no text."""
    if not isinstance(words, str):
        return ""
    text = encodable(words)
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return printable(text, len(text))

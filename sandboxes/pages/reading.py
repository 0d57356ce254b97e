"""The families' tool, which reads one page at a time."""

from __future__ import annotations

from agentrl.agent import tool
from agentrl.protocols import Sandbox

MOST_BYTES = 100_000
MOST_PAGES = 10_000


@tool
async def read(page: int, sandbox: Sandbox) -> str:
    """Read a page.

    Args:
        page: its number, from 1
    """
    if not 0 < page < MOST_PAGES:
        return "error: there is no such page"
    try:
        return (await sandbox.read(f"page{page}.txt", max_bytes=MOST_BYTES)).decode(errors="replace")
    except FileNotFoundError:
        return f"error: there is no page {page}"

"""The family's tool, which opens one drawer at a time."""

from __future__ import annotations

from agentrl.agent import tool
from agentrl.protocols import Sandbox

MOST_BYTES = 100_000


@tool
async def look(drawer: int, sandbox: Sandbox) -> str:
    """Look into a drawer of the project's archive.

    Args:
        drawer: its number, from 1
    """
    try:
        return (await sandbox.read(f"drawer{drawer}.txt", max_bytes=MOST_BYTES)).decode(errors="replace")
    except FileNotFoundError:
        return f"error: there is no drawer {drawer}"

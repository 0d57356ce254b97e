"""Tools that call a backend, in a file of their own, which is imported where they are called."""

from __future__ import annotations

import asyncio
import urllib.request

from agentrl.agent import tool

BACKEND = {"url": ""}  # of the test's server


@tool
def look_up(key: str) -> str:
    """Look a word up in the backend."""
    with urllib.request.urlopen(f"{BACKEND['url']}/{key}", timeout=5) as answer:
        return str(answer.read().decode())


@tool
def fetch(url: str) -> str:
    """Fetch a page."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


@tool(timeout_s=1.0)
async def compute(seconds: float) -> str:
    """Compute for so long."""
    await asyncio.sleep(seconds)
    return "done"

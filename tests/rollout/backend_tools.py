"""Tools that call a backend. They are in their own file, because it is imported where they run."""

from __future__ import annotations

import asyncio
import urllib.request

from agentrl.agent import tool

BACKEND = {"url": ""}  # URL of the test's server


@tool
def look_up(key: str) -> str:
    """Look up a word in the backend."""
    with urllib.request.urlopen(f"{BACKEND['url']}/{key}", timeout=5) as answer:
        return str(answer.read().decode())


@tool
def fetch(url: str) -> str:
    """Fetch a page."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


@tool(timeout_s=1.0)
async def compute(seconds: float) -> str:
    """Compute for some seconds."""
    await asyncio.sleep(seconds)
    return "done"

"""The tools that a task names by a word."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.agent.filetools import FILE_TOOLS
from agentrl.agent.tools import BUILT_IN, Tool

SHIPPED_TOOLS: Mapping[str, Tool] = {**BUILT_IN, **FILE_TOOLS}

"""The agent of an episode: the turn loop, its tools, and the exact tokens of its chat.

`TurnLoop` is the built-in `agentrl.protocols.Agent`; `ChatFormat` converts each message to token ids exactly once; `tool` turns a function
into a tool.
"""

from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.agent.invoke import call_tool
from agentrl.agent.toolbox import Toolbox, load_tools
from agentrl.agent.tools import Tool, ToolOutcome
from agentrl.agent.turns import TurnLoop
from agentrl.agent.typed import TaskData, tool

__all__ = [
    "ChatFormat",
    "ParsedCompletion",
    "TaskData",
    "Tool",
    "ToolOutcome",
    "Toolbox",
    "TurnLoop",
    "call_tool",
    "load_tools",
    "tool",
]

"""Rollouts: one policy acting in one sandbox, in exact tokens, and groups of such episodes.

`ChatFormat` turns messages into token ids once, `EpisodeRunner` is the turn loop, `GroupRunner` retries and groups.
"""

from agentrl.rollout.chat import ChatFormat, ParsedCompletion
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.group import GroupRunner
from agentrl.rollout.tools import Tool, ToolOutcome, load_tools

__all__ = ["ChatFormat", "EpisodeRunner", "GroupRunner", "ParsedCompletion", "Tool", "ToolOutcome", "load_tools"]

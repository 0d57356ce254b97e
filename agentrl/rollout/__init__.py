"""Rollouts: one policy acting in one sandbox, in exact tokens, and groups of such episodes.

`ChatFormat` turns messages into token ids once, `EpisodeRunner` is the turn loop, `GroupRunner` retries and groups.
"""

from agentrl.rollout.chat import ChatFormat, ParsedCompletion
from agentrl.rollout.episode import Capture, EpisodeRunner, OnTurn
from agentrl.rollout.faults import fault, task_fault
from agentrl.rollout.group import GroupRunner, OnAttempt, left_out_group
from agentrl.rollout.tools import Tool, ToolOutcome, load_tools

__all__ = [
    "Capture",
    "ChatFormat",
    "EpisodeRunner",
    "GroupRunner",
    "OnAttempt",
    "OnTurn",
    "ParsedCompletion",
    "Tool",
    "ToolOutcome",
    "fault",
    "left_out_group",
    "load_tools",
    "task_fault",
]

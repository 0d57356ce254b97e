"""Runs episodes and groups of episodes.

`EpisodeRunner` runs one attempt of an `agentrl.protocols.Agent`, `GroupRunner` retries attempts and groups them, `Admission` limits how
many run at once.
"""

from agentrl.rollout.admission import Admission
from agentrl.rollout.episode import EpisodeRunner, Hosted
from agentrl.rollout.faults import fault, task_fault
from agentrl.rollout.group import GroupRunner, MemoryOf, OnAttempt, left_out_group
from agentrl.rollout.life import Capture, OnTurn
from agentrl.rollout.pace import Pace
from agentrl.rollout.remembering import Forgotten
from agentrl.rollout.thinking import bound_of

__all__ = [
    "Admission",
    "Capture",
    "EpisodeRunner",
    "Forgotten",
    "GroupRunner",
    "Hosted",
    "MemoryOf",
    "OnAttempt",
    "OnTurn",
    "Pace",
    "bound_of",
    "fault",
    "left_out_group",
    "task_fault",
]

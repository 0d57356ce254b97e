"""Rollouts: the life of an episode, whoever acts in it, and groups of such episodes.

`EpisodeRunner` runs one attempt of an `agentrl.protocols.Agent`, `GroupRunner` retries and groups, `Admission` says when one may begin.
"""

from agentrl.rollout.active import Capture, OnTurn
from agentrl.rollout.admission import Admission
from agentrl.rollout.episode import EpisodeRunner, Hosted
from agentrl.rollout.episode_memory import Forgotten
from agentrl.rollout.faults import fault, task_fault
from agentrl.rollout.group import GroupRunner, MemoryOf, OnAttempt, left_out_group
from agentrl.rollout.pace import Pace
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

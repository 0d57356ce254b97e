"""Rollouts: the life of an episode, whoever acts in it, and groups of such episodes.

`EpisodeRunner` runs one attempt of an `agentrl.protocols.Agent`, `GroupRunner` retries and groups, `Admission` says when one may begin.
"""

from agentrl.rollout.active import CaptureState, TurnListener
from agentrl.rollout.admission import Admission
from agentrl.rollout.episode import EpisodeRunner, RequestRouter
from agentrl.rollout.episode_memory import EmptyMemory
from agentrl.rollout.faults import failure_from_error, task_fault
from agentrl.rollout.group import AttemptListener, GroupRunner, MemorySource, excluded_group
from agentrl.rollout.pace import Pace
from agentrl.rollout.thinking import thinking_bound

__all__ = [
    "Admission",
    "AttemptListener",
    "CaptureState",
    "EmptyMemory",
    "EpisodeRunner",
    "GroupRunner",
    "MemorySource",
    "Pace",
    "RequestRouter",
    "TurnListener",
    "excluded_group",
    "failure_from_error",
    "task_fault",
    "thinking_bound",
]

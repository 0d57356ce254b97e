"""Runs episodes and groups of episodes.

`EpisodeRunner` runs one attempt of an `agentrl.protocols.Agent`. `GroupRunner` runs groups of attempts and retries them after faults.
`Admission` limits how many episodes run at once.
"""

from agentrl.rollout.episode import EmptyMemory, EpisodeRunner
from agentrl.rollout.faults import failure_from_error, task_fault
from agentrl.rollout.group import GroupRunner, excluded_attempt, excluded_group
from agentrl.rollout.hooks import AttemptListener, CaptureState, GroupSampler, MemorySource, RequestRouter, TurnListener
from agentrl.rollout.pace import Pace
from agentrl.rollout.requests import thinking_bound
from agentrl.rollout.scheduling import Admission

__all__ = [
    "Admission",
    "AttemptListener",
    "CaptureState",
    "EmptyMemory",
    "EpisodeRunner",
    "GroupRunner",
    "GroupSampler",
    "MemorySource",
    "Pace",
    "RequestRouter",
    "TurnListener",
    "excluded_attempt",
    "excluded_group",
    "failure_from_error",
    "task_fault",
    "thinking_bound",
]

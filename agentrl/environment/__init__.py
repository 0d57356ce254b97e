"""Environments with `reset` and `step`, the processes in which they run, and adapters for environments from other projects.

A user-supplied environment is a subclass of `Environment`. A recipe refers to the class with `tasks.family="mine:Guess"`.
"""

from agentrl.environment.base import NEWEST_NOTE, NOTES, Environment
from agentrl.environment.games import Game
from agentrl.environment.opening import close_environments, is_resumable, open_environment
from agentrl.environment.returns import episode_return
from agentrl.errors import PolicyFault
from agentrl.records import Observation, RoleStep, Step

__all__ = [
    "NEWEST_NOTE",
    "NOTES",
    "Environment",
    "Game",
    "Observation",
    "PolicyFault",
    "RoleStep",
    "Step",
    "close_environments",
    "episode_return",
    "is_resumable",
    "open_environment",
]

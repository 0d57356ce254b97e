"""The protocols of agentrl's parts, one file per package. Other packages implement the protocols. No module of this package imports an
implementation.

Every wait has a deadline in seconds, after which it raises a typed error (`agentrl.errors`).
"""

from agentrl.protocols.cluster import Launcher, PartCommand, PartHandle
from agentrl.protocols.environment import Environment, EnvironmentOpener, League, Opponent, ResumableEnvironment, RoleEnvironment
from agentrl.protocols.episode import Agent, EpisodeMemory, ExternalRequest, LiveEpisode, LiveTrajectory, MemoryView, ToolSource
from agentrl.protocols.experience import Delivery, EpisodeCheckpoints, EvaluationStore, ExperienceStore, GroupCommit, GroupTransport
from agentrl.protocols.learning import AdvantageEstimator, Loss, LossTokens
from agentrl.protocols.reward import PreparedVerifier, SandboxVerifier, Verifier
from agentrl.protocols.sandbox import Sandbox, SandboxBackend
from agentrl.protocols.serving import CacheUse, Policy, PolicyServer, WeightChannel
from agentrl.protocols.task import GoldFamily, TaskFamily, VariedFamily
from agentrl.protocols.tracking import EpisodeListener, Interval, SilentListener, Tracker
from agentrl.protocols.version import VersionRegistry

__all__ = [
    "AdvantageEstimator",
    "Agent",
    "CacheUse",
    "Delivery",
    "Environment",
    "EnvironmentOpener",
    "EpisodeCheckpoints",
    "EpisodeListener",
    "EpisodeMemory",
    "EvaluationStore",
    "ExperienceStore",
    "ExternalRequest",
    "GoldFamily",
    "GroupCommit",
    "GroupTransport",
    "Interval",
    "Launcher",
    "League",
    "LiveEpisode",
    "LiveTrajectory",
    "Loss",
    "LossTokens",
    "MemoryView",
    "Opponent",
    "PartCommand",
    "PartHandle",
    "Policy",
    "PolicyServer",
    "PreparedVerifier",
    "ResumableEnvironment",
    "RoleEnvironment",
    "Sandbox",
    "SandboxBackend",
    "SandboxVerifier",
    "SilentListener",
    "TaskFamily",
    "ToolSource",
    "Tracker",
    "VariedFamily",
    "Verifier",
    "VersionRegistry",
    "WeightChannel",
]

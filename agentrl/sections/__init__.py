"""The sections of a recipe, by subject; `agentrl.recipe` hands them on, and says what must fit together between them."""

from __future__ import annotations

from agentrl.sections.failures import CaptureConfig
from agentrl.sections.learner import LearnerConfig, Limit, LimitsConfig, LoraConfig
from agentrl.sections.objective import CriticConfig, ObjectiveConfig
from agentrl.sections.rollout import BranchingConfig, CompactionConfig, DelegationConfig, EvalConfig, RolloutConfig
from agentrl.sections.serving import JudgeServerConfig, PolicyConfig, ServingConfig
from agentrl.sections.tasks import GroupJudging, PracticeConfig, TasksConfig, WeightingConfig
from agentrl.sections.tools import MCPConfig, MemoryConfig, SandboxConfig, ToolBounds, ToolsConfig

__all__ = [
    "BranchingConfig",
    "CaptureConfig",
    "CompactionConfig",
    "CriticConfig",
    "DelegationConfig",
    "EvalConfig",
    "GroupJudging",
    "JudgeServerConfig",
    "LearnerConfig",
    "Limit",
    "LimitsConfig",
    "LoraConfig",
    "MCPConfig",
    "MemoryConfig",
    "ObjectiveConfig",
    "PolicyConfig",
    "PracticeConfig",
    "RolloutConfig",
    "SandboxConfig",
    "ServingConfig",
    "TasksConfig",
    "ToolBounds",
    "ToolsConfig",
    "WeightingConfig",
]

"""Records for environments: specification, observation and step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl.records.fields import JsonObject, Record, Text

RESUMES = ("snapshot", "replay", "restart")
PASS_THRESHOLD = 1.0
"""Minimum score of a passing episode if no other threshold is declared."""
RETURN = "agentrl.environment:episode_return"
"""The verifier whose score is the sum of the rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec(Record):
    """The environment of a task's episodes, such as `EnvironmentSpec(ref="gymnasium:CartPole-v1", seed=7)`.

    All attempts at a task start the environment with the same seed and options.
    """

    ref: str  # "gymnasium:ID", "openenv:URL", or a plug-in reference such as "mine:Guess"
    options: JsonObject = field(default_factory=dict)
    seed: int = 0
    context_turns: int | None = None  # number of turns after which a new context starts from the last observation; None means no limit
    resume: str = "replay"  # how a later process continues an episode: snapshot | replay | restart
    pass_threshold: float | None = PASS_THRESHOLD  # minimum sum of rewards of a passing episode; None means no threshold

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not self.ref:
            raise ValueError("EnvironmentSpec.ref is empty")
        if self.context_turns is not None and self.context_turns < 1:
            raise ValueError(f"EnvironmentSpec.context_turns must be at least 1, got {self.context_turns}")
        if self.resume not in RESUMES:
            raise ValueError(f"EnvironmentSpec.resume must be one of {', '.join(RESUMES)}, got {self.resume!r}")
        if self.pass_threshold is not None and not math.isfinite(self.pass_threshold):
            raise ValueError(f"EnvironmentSpec.pass_threshold must be a finite number or None, got {self.pass_threshold}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation(Record):
    """The text and media that an environment shows to an agent, such as `Observation(text="You are at (0, 0).")`."""

    __pydantic_config__: ClassVar[Any] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}  # for agentrl.records.codec

    text: Text
    media: tuple[bytes, ...] = ()  # shown after the text: PNG or JPEG files, npy files with pixels (uint8 [H, W, 3 or 4]) or other numbers
    actions: tuple[str, ...] = ()  # the actions that are allowed now, if the environment does not allow all of its actions


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStep(Record):
    """The result of the actions of one or more roles in an environment with several agents."""

    observations: Mapping[str, Observation]  # of the roles that act next; after the last step, of the roles that see the end
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False

    @property
    def done(self) -> bool:
        """Whether no more steps are possible."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Record):
    """The result of one action.

    `terminated` means that the environment reached a final state, such as a goal, a loss or a death. `truncated` means that the episode was
    cut off, for example by a limit on steps. Truncation is not a failure, and a critic estimates the value of the steps that would have
    followed.
    """

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward, for the record
    note: Text = ""  # a note for later episodes, if the run has a memory; empty means none

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not math.isfinite(self.reward):
            raise ValueError(f"Step.reward must be finite, got {self.reward}")

    @property
    def done(self) -> bool:
        """Whether no more steps are possible."""
        return self.terminated or self.truncated

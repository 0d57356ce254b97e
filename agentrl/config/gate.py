"""Settings for captured failures (`capture`), and for the gate that evaluates versions on a suite (`gate`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section

GATE = "gate"
"""Key, in a version's record (`PolicyVersion.evals`), of its success on the suite."""


class GateConfig(Section):
    """The gate: evaluates versions on a suite of cases, and compares them with the last promoted version."""

    suite: str = Field(min_length=1)
    """Folder of the suite, relative to the project root."""
    every: int = Field(1, ge=1)
    """Versions between evaluations. Version 0 (the first baseline) and the last version are always evaluated."""
    repeats: int = Field(4, ge=1, le=1000)
    """Attempts per case and version, unless the case sets its own number. With fewer than 3, only the suite's mean can block."""
    margin: float = Field(0.0, ge=0, lt=1)
    """Maximum drop in the suite's mean score that never blocks a version."""
    action: Literal["block", "rollback"] = "rollback"
    """block: a worse version is not promoted, and training continues from it. rollback: the server and learner also return to the last
    promoted version."""
    server: Literal["shared", "own"] = "shared"
    """shared: the policy's servers run the attempts, and load no newer version meanwhile. own: an additional server runs them."""

    @property
    def rolls_back(self) -> bool:
        """Whether the run rolls back a version that the gate blocks."""
        return self.action == "rollback"


class CaptureConfig(Section):
    """Failures in training and evaluation, stored as traces in the run folder. See docs/failures.md."""

    rules: tuple[str, ...] = ()
    """User-supplied triage rules. They run before the built-in rules."""

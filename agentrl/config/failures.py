"""Settings for captured failures: `capture`."""

from __future__ import annotations

from pydantic import Field, model_validator

from agentrl.config.section import Section


class CaptureConfig(Section):
    """Failures of training and evaluation, stored as traces in the run folder. See docs/failures.md."""

    keep: int = Field(500, ge=0)
    """Traces kept per phase (training, each evaluation). All failures are counted. 0 disables capture."""
    rules: tuple[str, ...] = ()
    """User-supplied triage rules. They run before the built-in rules."""

    @model_validator(mode="after")
    def _every_key_acts(self) -> CaptureConfig:
        if self.keep == 0 and self.rules:
            raise ValueError("rules do nothing with keep=0, which captures nothing: remove one of them")
        return self

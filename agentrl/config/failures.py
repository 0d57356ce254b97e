"""Settings for captured failures: `capture`."""

from __future__ import annotations

from pydantic import Field, model_validator

from agentrl.config.section import Section


class CaptureConfig(Section):
    """Failures of training and evaluation, stored as traces in the run folder. See docs/failures.md."""

    below: float = 1.0
    """Score below which an episode counts as failed."""
    keep: int = Field(500, ge=0)
    """Traces kept per phase (training, each evaluation). All failures are counted. 0 disables capture."""
    rules: tuple[str, ...] = ()
    """User-supplied triage rules. They run before the built-in rules."""

    @model_validator(mode="after")
    def _every_key_acts(self) -> CaptureConfig:
        usual = type(self).model_fields
        if self.keep == 0 and any(getattr(self, key) != usual[key].default for key in ("below", "rules")):
            raise ValueError("below and rules do nothing with keep=0, which captures nothing: leave them at their defaults")
        return self

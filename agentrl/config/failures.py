"""Settings for captured failures: `capture`."""

from __future__ import annotations

from agentrl.config.section import Section


class CaptureConfig(Section):
    """Failures of training and evaluation, stored as traces in the run folder. See docs/failures.md."""

    rules: tuple[str, ...] = ()
    """User-supplied triage rules. They run before the built-in rules."""

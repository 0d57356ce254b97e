"""For all tests: what a property test may take depends on the machine, so hypothesis measures no time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("agentrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentrl")

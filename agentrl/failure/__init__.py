"""Handling of failures not caused by the policy: broken tasks are quarantined, and too many faults pause the run."""

from agentrl.failure.quarantine import Quarantine
from agentrl.failure.rate import FaultRate

__all__ = ["FaultRate", "Quarantine"]

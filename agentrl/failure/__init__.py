"""Failures of the policy, captured, tagged, clustered and promoted to regression cases; broken tasks; the rate of faults."""

from agentrl.failure.capture import Capture
from agentrl.failure.faults import FaultRate, Quarantine

__all__ = ["Capture", "FaultRate", "Quarantine"]

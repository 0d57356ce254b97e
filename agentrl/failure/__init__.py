"""Failures of the policy, captured, tagged, clustered and promoted to regression cases; broken tasks; the rate of faults."""

from agentrl.failure.capture import Capture
from agentrl.failure.quarantine import Quarantine
from agentrl.failure.rate import FaultRate

__all__ = ["Capture", "FaultRate", "Quarantine"]

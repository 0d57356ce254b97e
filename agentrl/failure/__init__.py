"""Captures, tags and clusters failures of the policy, promotes them to regression cases, and measures faults and broken tasks."""

from agentrl.failure.capture import Capture
from agentrl.failure.faults import FaultRate, Quarantine

__all__ = ["Capture", "FaultRate", "Quarantine"]

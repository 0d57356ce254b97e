"""What went wrong: failures of the policy captured, named, clustered and made regression cases; broken tasks and faults held in bounds."""

from agentrl.failure.capture import Capture
from agentrl.failure.quarantine import Quarantine
from agentrl.failure.rate import FaultRate

__all__ = ["Capture", "FaultRate", "Quarantine"]

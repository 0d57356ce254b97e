"""What to do about failures that are nobody's policy: broken tasks go into quarantine, and too many faults pause the run."""

from agentrl.failure.quarantine import Quarantine
from agentrl.failure.rate import FaultRate

__all__ = ["FaultRate", "Quarantine"]

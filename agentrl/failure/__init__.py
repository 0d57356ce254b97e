"""What to do about failures that are nobody's policy: tasks that are wrong in themselves go into quarantine."""

from agentrl.failure.quarantine import Quarantine

__all__ = ["Quarantine"]

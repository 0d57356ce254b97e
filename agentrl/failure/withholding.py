"""Moved to `agentrl.failure.twins`."""

from agentrl.failure.twins import FILE, Withholding, count  # noqa: F401

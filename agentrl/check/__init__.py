"""Checks of a task family (`agentrl check`). Each module tests one property and reports what it examined."""

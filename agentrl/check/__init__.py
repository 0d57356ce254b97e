"""Checks of a task family (`agentrl check`): each module tests one property and reports what it examined."""

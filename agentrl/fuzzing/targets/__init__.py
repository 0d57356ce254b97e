"""A module for each boundary; `target` in it is what `agentrl fuzz` runs."""

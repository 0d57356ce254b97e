"""One module for each boundary; `agentrl fuzz` runs the `target` in it."""

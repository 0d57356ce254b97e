"""The gate of a run: the rule that promotes or blocks a policy version, the verdicts on a run's versions, and the gate's server."""

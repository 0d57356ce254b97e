"""The gate: the rule that admits or blocks a policy version, its judgement of a run's versions, and the server that it may use."""

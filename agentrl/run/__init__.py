"""A run from its first check to its summary: `loop` is the pipeline, the other modules are what it calls."""

"""Assigns a machine's devices to the parts of a run."""

"""Proof as a product: the promises of task families, sandbox backends and boundaries, tested by trying to break them.

`check` tests a family, or a backend through `conformance` and `attacks`; the other modules each prove one thing, and say what they
looked at. `fuzzing` feeds hostile bytes to the boundaries.
"""

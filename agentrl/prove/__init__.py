"""Checks that try to break the promises of task families, sandbox backends and trust boundaries.

`check` tests a family, or a backend through `conformance` and `attacks`. The other modules each check one claim and report what they
examined. `fuzzing` sends hostile bytes to the boundaries.
"""

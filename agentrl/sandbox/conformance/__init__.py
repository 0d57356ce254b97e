"""Conformance checks of sandbox backends, shipped with the product: run them on your machine, or on your own backend.

Each check opens what it needs through the public protocol and acts as a hostile program would. `check_conformance` runs all of them.
"""

from agentrl.sandbox.conformance import basics, network, sessions, shares
from agentrl.sandbox.conformance.bench import CHECKS, BackendUnderTest, ConformanceError, ConformanceResult, check_conformance

__all__ = [
    "CHECKS",
    "BackendUnderTest",
    "ConformanceError",
    "ConformanceResult",
    "basics",
    "check_conformance",
    "network",
    "sessions",
    "shares",
]

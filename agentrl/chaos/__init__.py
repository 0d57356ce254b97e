"""Injects faults into a small real run, and verifies that the run recovers and loses no data."""

from agentrl.chaos.cases import CASES, Case
from agentrl.chaos.soak import run_soak
from agentrl.chaos.subject import ChaosError, Subject
from agentrl.chaos.suite import Result, run_cases

__all__ = ["CASES", "Case", "ChaosError", "Result", "Subject", "run_cases", "run_soak"]

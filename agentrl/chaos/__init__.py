"""Proves that a run survives the loss of its parts: injects faults into a real small run, and checks what must hold afterwards."""

from agentrl.chaos.cases import CASES, Case
from agentrl.chaos.soak import run_soak
from agentrl.chaos.subject import ChaosError, Subject
from agentrl.chaos.suite import Result, run_cases

__all__ = ["CASES", "Case", "ChaosError", "Result", "Subject", "run_cases", "run_soak"]

"""Evaluation of policies on suites and held-out splits, and the paired comparison of two policies."""

from agentrl.evaluation.comparison import Comparison, ComparisonVerdict, Scores, compare
from agentrl.evaluation.results import CaseAttempt, EvaluationInfo, SuiteResults

__all__ = ["CaseAttempt", "Comparison", "ComparisonVerdict", "EvaluationInfo", "Scores", "SuiteResults", "compare"]

"""Comparing two policies on the same cases: paired tests, intervals, how many cases it takes, and the rule of the gate.

Pure functions of scores, standard library alone, and the files that an evaluation of a suite is kept in.
"""

from agentrl.evaluation.comparison import Comparison, ComparisonVerdict, Scores, compare
from agentrl.evaluation.results import CaseAttempt, EvaluationInfo, SuiteResults
from agentrl.gate.rule import GateRule, RuleResult, apply_rule, cases_to_retry

__all__ = [
    "CaseAttempt",
    "Comparison",
    "ComparisonVerdict",
    "EvaluationInfo",
    "GateRule",
    "RuleResult",
    "Scores",
    "SuiteResults",
    "apply_rule",
    "cases_to_retry",
    "compare",
]

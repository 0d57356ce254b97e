"""Comparing two policies on the same cases: paired tests, intervals, how many cases it takes, and the rule of the gate.

Pure functions of scores, standard library alone, and the files that an evaluation of a suite is kept in.
"""

from agentrl.evaluation.comparison import Comparison, Scores, Verdict, compare
from agentrl.evaluation.results import About, Attempt, Results
from agentrl.gate.rule import Judgement, Rule, judge, suspicious

__all__ = ["About", "Attempt", "Comparison", "Judgement", "Results", "Rule", "Scores", "Verdict", "compare", "judge", "suspicious"]

"""Judges: verifiers that ask a language model, or several. What cannot be judged is unscored, never 0.

They are verifiers (`agentrl.protocols.Verifier`) that a recipe or a task names by reference, like any other.
"""

from agentrl.base.backoff import Clock, SystemClock
from agentrl.judge.endpoint import Endpoint, Prices, Reply
from agentrl.judge.ensemble import Ensemble
from agentrl.judge.ledger import Budget, JudgeUsage
from agentrl.judge.listwise import GroupJudge, Listwise
from agentrl.judge.model import ModelJudge
from agentrl.judge.pairwise import Comparison, Pairwise
from agentrl.judge.reward_model import RewardModel, ScoreEndpoint
from agentrl.judge.scoring import Criterion, Form, Judge
from agentrl.judge.servers import served

__all__ = [
    "Budget",
    "Clock",
    "Comparison",
    "Criterion",
    "Endpoint",
    "Ensemble",
    "Form",
    "GroupJudge",
    "Judge",
    "JudgeUsage",
    "Listwise",
    "ModelJudge",
    "Pairwise",
    "Prices",
    "Reply",
    "RewardModel",
    "ScoreEndpoint",
    "SystemClock",
    "served",
]

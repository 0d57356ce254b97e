"""Judges: verifiers that query one or more language models. An episode that cannot be judged is unscored, never 0.

Recipes and tasks refer to a judge in the same way as to any other verifier (`agentrl.protocols.Verifier`).
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

"""Judges: verifiers that ask one or more language models. An episode that a judge cannot judge is unscored, never 0.

A recipe or a task refers to a judge like to any other verifier (`agentrl.protocols.Verifier`).
"""

from agentrl.reward.judges.backoff import Clock, SystemClock
from agentrl.reward.judges.endpoint import Endpoint, Prices, Reply
from agentrl.reward.judges.ensemble import Ensemble
from agentrl.reward.judges.ledger import Budget, Spent
from agentrl.reward.judges.listwise import GroupJudge, Listwise
from agentrl.reward.judges.model import ModelJudge
from agentrl.reward.judges.pairwise import Comparison, Pairwise
from agentrl.reward.judges.reward_model import RewardModel, ScoreEndpoint
from agentrl.reward.judges.scoring import Criterion, Form, Judge
from agentrl.reward.judges.servers import served

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
    "Listwise",
    "ModelJudge",
    "Pairwise",
    "Prices",
    "Reply",
    "RewardModel",
    "ScoreEndpoint",
    "Spent",
    "SystemClock",
    "served",
]

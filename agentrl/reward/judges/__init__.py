"""Judges: verifiers that ask a language model, or several. What cannot be judged is unscored, never 0.

They are verifiers (`agentrl.protocols.Verifier`) that a recipe or a task names by reference, like any other.
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

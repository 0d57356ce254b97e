"""Limits, metrics that are NaN, and the schedules of learning rate and entropy weight."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from agentrl.config.learner import UpdateMetric
from agentrl.config.recipe import LearnerConfig, Limit
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.update_guard import REFUSE_ALL, UpdateGuard
from agentrl.objective.policy_loss import policy_loss
from agentrl.records import Batch
from tests.objective.test_policy_loss import build_objective, draw

PART = Batch(step=3, samples=(), denominator=1, group_indices=(7,))


@pytest.mark.parametrize("metric", get_args(UpdateMetric))
def test_nan_violates_a_limit(metric: Any) -> None:
    """A model that masks part of its vocabulary with -inf has an entropy of NaN and a finite loss. Comparisons with NaN are false."""
    bound = 5.0 if metric == "ratio_max" else 0.5
    guard = UpdateGuard(LearnerConfig(max_grad_norm=0.1, limits=(Limit(metric=metric, at=bound, action="rollback"),)))
    metrics = {"loss": 0.1, metric: math.nan}
    assert guard.largest_norm(metrics) == REFUSE_ALL
    guard.record_policy_step(PART, metrics, applied=False)
    assert guard.rolling_back, "the action of the limit, not that of a non-finite loss"
    (failure,) = guard.take_failures()
    assert failure.reasons[-1] == f"{metric} is not a number, so its limit {bound:g} (learner.limits) cannot be checked"


def test_a_metric_without_limit_or_value_rejects_no_update() -> None:
    guard = UpdateGuard(LearnerConfig(limits=(Limit(metric="kl_reference", at=0.5),)))
    assert guard.largest_norm({"loss": 0.1, "entropy": math.nan}) == math.inf


def test_an_alert_limit_rejects_no_update_and_a_second_limit_does() -> None:
    alerting, rejecting = Limit(metric="ess", at=0.5, action="alert"), Limit(metric="ess", at=0.2)
    assert UpdateGuard(LearnerConfig(limits=(alerting,))).largest_norm({"ess": 0.1}) == math.inf
    guard = UpdateGuard(LearnerConfig(limits=(rejecting, alerting)))
    assert guard.largest_norm({"ess": 0.3}) == math.inf and guard.largest_norm({"ess": 0.1}) == REFUSE_ALL


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.8535534, 0.5, 0.1464466]),
        ("inverse_sqrt", [1 / 3, 2 / 3, 1.0, (3 / 4) ** 0.5, (3 / 5) ** 0.5, (3 / 6) ** 0.5]),
    ],
)
def test_the_rate_rises_and_then_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    learner = LearnerConfig.model_validate({"lr": 2.0, "warmup_steps": 2, "lr_schedule": schedule})
    assert [learning_rate(learner, 6, step) / 2.0 for step in range(6)] == pytest.approx(expected)
    if schedule in ("constant", "inverse_sqrt"):
        assert [learning_rate(learner, math.inf, step) / 2.0 for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize(("progress", "weight"), [(0.0, 0.5), (0.25, 0.4), (1.0, 0.1), (1.5, 0.1)])
def test_an_entropy_weight_changes_linearly_until_the_last_step(progress: float, weight: float) -> None:
    tokens = draw(0)
    objectives = [build_objective({"entropy_coef": value}) for value in ([0.5, 0.1], weight)]
    changing, constant = (policy_loss(tokens, objective, denominator=100, progress=progress).loss.item() for objective in objectives)
    assert changing == pytest.approx(constant, abs=1e-12)

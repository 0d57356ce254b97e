from __future__ import annotations

import pytest

from agentrl.config import LearnerConfig
from agentrl.learner.optimizer import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_the_rate_rises_and_then_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    learner = LearnerConfig.model_validate({"lr": 2.0, "warmup_steps": 2, "lr_schedule": schedule})
    assert [learning_rate(learner, 6, step) / 2.0 for step in range(6)] == pytest.approx(expected)

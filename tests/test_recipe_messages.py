"""What is said of a number that no run can use, and of keys that do not go together."""

from __future__ import annotations

import pytest

from agentrl.errors import RecipeError
from agentrl.recipe import PolicyConfig, Recipe, TasksConfig, apply_overrides

BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN"])
@pytest.mark.parametrize("key", ["learner.max_grad_norm", "learner.lr", "objective.is_cap", "learner.limits.max_kl.at", "critic.gamma"])
def test_a_number_that_is_not_finite_is_refused_by_name(key: str, value: str) -> None:
    """`recipe.json` would keep it as null, and the learner, which reads that, would be the one to fail."""
    with pytest.raises(RecipeError, match=rf"{key}: Input should be a finite number \(got "):
        apply_overrides(BASE, ["objective.advantage=gae", "critic={}", f"{key}={value}"])


def test_keys_that_do_not_go_together_are_told_without_the_rest_of_their_section() -> None:
    with pytest.raises(RecipeError) as error:
        apply_overrides(BASE, ["objective.kl=k3"])
    assert str(error.value).startswith("objective: kl and kl_coef go together") and "got" not in str(error.value)
    with pytest.raises(RecipeError, match=r"learner\.lr: Input should be greater than 0 \(got -1\)"):
        apply_overrides(BASE, ["learner.lr=-1"])

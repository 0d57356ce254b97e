"""What is said of a number that no run can use, and of keys that do not go together."""

from __future__ import annotations

import pytest

from agentrl.config import PolicyConfig, Recipe, TasksConfig, apply_overrides
from agentrl.errors import RecipeError
from agentrl.records.sampling import Sampling

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


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (r'tools.words={"python": {"description": "runs \ud800"}}', "tools.words.python.description"),
        (r'tools.words={"python": {"arguments": {"\udc00": "x"}}}', "tools.words.python.arguments"),
        (r'tasks.family.options={"path": "b\udfff"}', "tasks.family"),
        ("policy.model=a\ud800", "policy.model"),
    ],
)
def test_text_that_no_file_can_keep_is_refused_where_it_is_given(override: str, key: str) -> None:
    """Written into recipe.json it would fail when the run starts."""
    with pytest.raises(RecipeError) as error:
        apply_overrides(BASE, [override])
    assert str(error.value).startswith(f"{key}: it contains half of a surrogate pair")
    str(error.value).encode()
    assert apply_overrides(BASE, ["policy.model=a\N{GRINNING FACE}"]).policy.model == "a\N{GRINNING FACE}", "a whole pair is a letter"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.top_p=0.9"], "rollout: top_p and min_p need top_k: .* set top_k as well, for instance to 64"),
        (["rollout.min_p=0.05"], "rollout: top_p and min_p need top_k"),
        (["rollout.top_k=1"], "rollout: top_k=1 leaves every token without an alternative"),
        (["rollout.top_k=1000"], r"rollout\.top_k: Input should be less than or equal to 128 \(got 1000\)"),
        (["rollout.top_k=20", "rollout.top_p=0"], r"rollout\.top_p: Input should be greater than 0"),
        (["rollout.temperature=0.001"], r"rollout\.temperature: Input should be greater than or equal to 0\.01"),
        (["evaluation.temperature=0", "evaluation.top_k=20"], "evaluation: top_k, top_p and min_p do nothing at temperature=0"),
        (["evaluation.temperature=0.001"], r"evaluation: temperature must be 0 \(greedy\) or at least 0\.01"),
    ],
)
def test_sampling_that_cannot_be_trained_on_or_does_nothing_says_what_to_do(overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        apply_overrides(BASE, overrides)


def test_truncation_is_off_by_none_and_its_supports_are_kept_for_training_alone() -> None:
    chosen = ["top_k=20", "top_p=0.9", "min_p=0.05", "temperature=0.7"]
    made = apply_overrides(BASE, [f"{section}.{one}" for section in ("rollout", "evaluation") for one in chosen])
    assert made.rollout.sampling == Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, supports=True)
    assert made.evaluation.sampling == Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
    off = apply_overrides(made, [f"rollout.{key}=None" for key in ("top_k", "top_p", "min_p")])
    assert off.rollout.sampling == Sampling(temperature=0.7)
    assert apply_overrides(BASE, ["evaluation.top_p=0.9"]).evaluation.sampling == Sampling(top_p=0.9), "an evaluation trains nothing"

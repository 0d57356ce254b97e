"""Error messages for invalid numbers and for incompatible keys."""

from __future__ import annotations

import re

import pytest

from agentrl.config import Limit, PolicyConfig, Recipe, TasksConfig
from agentrl.config.section import resumable_keys
from agentrl.errors import RecipeError
from agentrl.records.sampling import Sampling

BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN"])
@pytest.mark.parametrize("key", ["learner.max_grad_norm", "learner.lr", "objective.off_policy.cap", "critic.gamma"])
def test_the_error_for_a_number_that_is_not_finite_names_the_key(key: str, value: str) -> None:
    """`recipe.json` would store it as null, and the learner would fail when it reads that."""
    with pytest.raises(RecipeError, match=rf"{key}: Input should be a finite number \(got "):
        BASE.but("objective.advantage=gae", "critic={}", f"{key}={value}")


def test_the_error_for_incompatible_keys_does_not_repeat_their_section() -> None:
    with pytest.raises(RecipeError) as error:
        BASE.but("objective.kl=k3")
    assert str(error.value).startswith("objective: kl and kl_coef go together") and "got" not in str(error.value)
    with pytest.raises(RecipeError, match=r"learner\.lr: Input should be greater than 0 \(got -1\)"):
        BASE.but("learner.lr=-1")


LIST_ERRORS = {
    '=[{"metric": "ess", "at": "x"}]': "learner.limits[0].at: Input should be a valid number, unable to parse string as a number (got 'x')",
    '=[{"metric": "ess", "at": 0.5}, {"metirc": "entropy", "at": 1}]': "learner.limits[1].metirc: unknown key; did you mean metric?",
    '=[{"metric": "entropi", "at": 1}]': "or 'excluded_policy_reachable'; did you mean entropy? (got 'entropi')",
    '=[{"action": "rolback"}]': "[0].action: Input should be 'skip', 'rollback', 'halt' or 'alert'; did you mean rollback?",
    '=[{"metric": "entropy", "at": Infinity}]': "learner.limits[0].at: Input should be a finite number",
    '=[{"metric": "clip_fraction", "at": 2}]': "learner.limits[0]: at must be between 0 and 1 for metric=clip_fraction",
    '={"metric": "ess", "at": 1}': "learner.limits: Input should be a valid tuple",
    ".entropy.at=1": "learner.limits.entropy.at: learner.limits is a list, whose items cannot be set alone\n  fix: write learner.limits=",
    "[0].at=1": 'fix: write learner.limits=[{"metric": ..., "at": ..., "action": ...}]',
}


@pytest.mark.parametrize("override", LIST_ERRORS)
def test_an_error_in_a_list_of_sections_has_its_index(override: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(LIST_ERRORS[override])):
        BASE.but(f"learner.limits{override}")


def test_a_list_of_sections_is_one_key() -> None:
    limits = (Limit(metric="ess", at=0.5), Limit(metric="entropy", at=0.5, action="halt"))
    data = [limit.model_dump() for limit in limits]
    assert BASE.but({"learner.limits": limits}).learner.limits == BASE.but({"learner.limits": data}).learner.limits == limits
    assert [key for key in resumable_keys(Recipe) if "limits" in key] == ["learner.limits"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (r'tools={"python": {"description": "runs \ud800"}}', "tools.python.description"),
        (r'tools={"python": {"arguments": {"\udc00": "x"}}}', "tools.python.arguments"),
        (r'tasks.family.options={"path": "b\udfff"}', "tasks.family"),
        ("policy.model=a\ud800", "policy.model"),
    ],
)
def test_text_with_half_a_surrogate_pair_raises_an_error_that_names_the_key(override: str, key: str) -> None:
    """Otherwise writing recipe.json would fail when the run starts."""
    with pytest.raises(RecipeError) as error:
        BASE.but(override)
    assert str(error.value).startswith(f"{key}: it contains half of a surrogate pair")
    str(error.value).encode()
    assert BASE.but("policy.model=a\N{GRINNING FACE}").policy.model == "a\N{GRINNING FACE}", "a full pair is a character"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.sampling.top_p=0.9"], r"rollout\.sampling: top_p and min_p need top_k: .* set top_k as well, for instance to 64"),
        (["rollout.sampling.min_p=0.05"], r"rollout\.sampling: top_p and min_p need top_k"),
        (["rollout.sampling.top_k=1"], r"rollout\.sampling: temperature=0 and top_k=1 leave only one candidate for every token"),
        (["rollout.sampling.temperature=0"], r"rollout\.sampling: temperature=0 and top_k=1 leave only one candidate for every token"),
        (["rollout.sampling.top_k=1000"], r"rollout\.sampling: top_k=1000 exceeds the 128 tokens that can be recorded"),
        (["rollout.sampling.top_k=20", "rollout.sampling.top_p=0"], r"rollout\.sampling\.top_p: Input should be greater than 0"),
        (["rollout.sampling.temperature=0.001"], r"rollout\.sampling: temperature must be 0 \(greedy\) or at least 0\.01"),
        (
            ["evaluation.sampling.temperature=0", "evaluation.sampling.top_k=20"],
            r"evaluation\.sampling: top_k, top_p and min_p do nothing at temperature=0",
        ),
        (["evaluation.sampling.temperature=0.001"], r"evaluation\.sampling: temperature must be 0 \(greedy\) or at least 0\.01"),
        (["evaluation.temperature=0.5"], r"evaluation\.temperature: unknown key; did you mean sampling\.temperature\?"),
    ],
)
def test_the_error_for_unusable_sampling_settings_suggests_a_fix(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        BASE.but(*overrides)


def test_none_disables_truncation_and_only_training_records_supports() -> None:
    settings = ["top_k=20", "top_p=0.9", "min_p=0.05", "temperature=0.7"]
    recipe = BASE.but(*(f"{section}.sampling.{setting}" for section in ("rollout", "evaluation") for setting in settings))
    assert recipe.rollout.sampling == recipe.evaluation.sampling
    assert recipe.rollout.distribution == Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, supports=True)
    assert recipe.evaluation.distribution == Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
    off = recipe.but(*(f"rollout.sampling.{key}=None" for key in ("top_k", "top_p", "min_p")))
    assert off.rollout.distribution == Sampling(temperature=0.7)
    only = BASE.but("evaluation.sampling.top_p=0.9").evaluation
    assert only.distribution == Sampling(top_p=0.9), "an evaluation trains nothing"

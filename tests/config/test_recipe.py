from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config import CriticConfig, LoraConfig, PolicyConfig, Recipe, TasksConfig, load
from agentrl.config import recipe as recipe_module
from agentrl.config.section import Needs, Section, key_docs, named_section_of, section_of
from agentrl.errors import RecipeError, UserError

ROOT = Path(__file__).resolve().parents[2]
BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


def test_the_package_exports_the_names_of_the_recipe_and_no_modules() -> None:
    names: dict[str, object] = {}
    exec("from agentrl.config import *", names)
    assert names.keys() - {"__builtins__"} == set(recipe_module.__all__)


def test_overrides_are_applied_and_typed() -> None:
    changed = BASE.but("learner.lr=1e-4", "steps=3", "policy.model=a/b", 'tasks.family.options={"size": 4}')
    assert (changed.learner.lr, changed.steps, changed.policy.model, changed.tasks.family.options) == (1e-4, 3, "a/b", {"size": 4})
    assert BASE.steps == 16


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("learner.lrr=1", ["learner.lrr", "lr"]),
        ("lerner.lr=1", ["lerner", "learner"]),
        ("learner.lr=fast", ["learner.lr", "number"]),
        ("learner.lr=-1", ["learner.lr", "greater than 0"]),
        ("sandbox.backend=host", ["sandbox.backend", "auto, docker, bubblewrap"]),
        ("steps=1.5", ["steps", "integer"]),
        ("name=a/b", ["name"]),
        ("rollout.group.size=1", ["rollout.group.size", "normalize_std"]),
        ("max_staleness=9", ["keep_versions"]),
        ("pipeline_depth=3", ["pipeline_depth must be at most max_staleness + 1 = 2"]),
        ("pipeline_depth=0", ["pipeline_depth", "greater than or equal to 1"]),
        ("rollout.group.branches=3", ["rollout.group", "multiple of branches"]),
        ("objective.dual_clip=3", ["objective", "off_policy.cap=2"]),
        ("objective.kl=k3", ["objective", "kl_coef"]),
        ("objective.off_policy.preset=mask_sequences", ["objective.off_policy.preset", "did you mean mask_sequence"]),
        ("objective.loss=ppo", ["objective.loss", "clip, gspo, cispo"]),
        ("learner.lora.dropout=0.1", ["learner.lora.dropout", "rank"]),
        ("learner.offload=parameters", ["learner.zero_stage=3"]),
        ("learner.sequence_parallel=2", ["learner.ranks"]),
        ("learner", ["KEY=VALUE"]),
    ],
)
def test_the_error_for_a_wrong_override_names_the_key_and_valid_values(override: str, texts: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        BASE.but(override)
    for text in texts:
        assert text in str(error.value)


def test_an_override_enables_an_optional_section() -> None:
    recipe = BASE.but("objective.advantage=gae", "critic.lr=0.5")
    assert recipe.critic == CriticConfig(lr=0.5)
    with pytest.raises(RecipeError, match=r"critic\.rate: unknown key; known here: epochs, gamma, lam, lr"):
        BASE.but("critic.rate=1")
    with pytest.raises(RecipeError, match=r"critic\.rate: unknown key; known here: epochs, gamma, lam, lr"):
        BASE.but("objective.advantage=gae", 'critic={"rate": 1}')


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", 32])
def test_an_unsupported_dtype_raises(dtype: object) -> None:
    with pytest.raises(RecipeError, match=r"policy\.dtype: Input should be 'float32' or 'bfloat16'"):
        BASE.but(f"policy.dtype={dtype}")


def test_rewritten_contexts_and_compaction_exclude_each_other() -> None:
    with pytest.raises(RecipeError, match="for agents with one context at a time"):
        BASE.but("policy.rewritten_context=restart", "rollout.compaction=0.5")


def test_incompatible_learner_settings_raise() -> None:
    for overrides, message in (
        (["learner.lora={}", "serving.weight_transfer=nccl"], "learner.lora publishes adapters"),
        (["learner.kernels=liger", "device=cpu"], "kernels=liger needs a GPU"),
        (["learner.offload=optimizer", "learner.zero_stage=0"], "learner.zero_stage 1, 2 or 3"),
        (["learner.ranks=3", "learner.sequence_parallel=2"], "must divide learner.ranks"),
        (["learner.ranks=2", "learner.sequence_parallel=2", "objective.advantage=gae", "critic={}"], "does not support a critic"),
        (["learner.ranks=2", "learner.sequence_parallel=2", "learner.max_tokens_per_microbatch=1023"], "split over the ranks of a team"),
    ):
        with pytest.raises(RecipeError, match=message):
            BASE.but(*overrides)
    recipe = BASE.but("learner.ranks=4", "learner.sequence_parallel=2", "learner.max_tokens_per_microbatch=1024")
    assert recipe.policy.max_model_len == 2048
    assert BASE.but("learner.lora={}").learner.lora == LoraConfig()


def test_nccl_transfer_without_gpus_raises() -> None:
    with pytest.raises(RecipeError, match="nccl copies from GPU to GPU"):
        BASE.but("serving.weight_transfer=nccl", "device=cpu")


def test_a_saved_recipe_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(BASE.model_dump_json())
    assert load(path) == BASE
    for text in ("{", "[" * 100_000, "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(UserError, match=r"recipe\.json is damaged"):
            load(path)


def test_every_key_of_a_recipe_is_documented() -> None:
    """Every key has a docstring, except for sections and keys whose name is enough."""
    obvious = {"name", "seed", "device", "engine", "lr", "weight_decay", "zero_stage", "max_grad_norm", "startup_timeout_s"}
    obvious |= {"request_timeout_s", "temperature", "clip_low"}
    undocumented = []
    for section in [Recipe, *(f.annotation for f in Recipe.model_fields.values())]:
        docs = key_docs(section) if hasattr(section, "model_fields") else {}
        for key, field in getattr(section, "model_fields", {}).items():
            is_section = hasattr(field.annotation, "model_fields")
            if not is_section and key not in docs and key not in obvious:
                undocumented.append(f"{section.__name__}.{key}")
    assert undocumented == []


def test_every_impossible_combination_raises_an_error() -> None:
    """Each line of the file has overrides that only one check of the recipe rejects, and each check has a line."""
    rows = (ROOT / "tests" / "config" / "impossible_combinations.txt").read_text().splitlines()
    sections = [path for path in (ROOT / "agentrl/config").glob("*.py") if path.name != "section.py"]
    raised = sum(len(re.findall(r"raise ValueError\(|\byield (?!from\b)", path.read_text())) for path in sections)
    needs = declared_needs()
    assert len(rows) == raised - 1 + len(needs)
    messages = set()
    for row in rows:
        with pytest.raises(RecipeError) as error:
            BASE.but(*row.split())
        messages.add(str(error.value))
    assert len(messages) == len(rows), "two lines raise the same error"
    undocumented = [need.what for need in needs if not any(need.what in message for message in messages)]
    assert not undocumented, "no line of the file triggers these needs"


def declared_needs(kind: type[Section] = Recipe) -> set[Needs]:
    """Returns the conditions (`agentrl.config.section.Needs`) of all keys of a recipe."""
    declared = {need for field in kind.model_fields.values() for need in field.metadata if isinstance(need, Needs)}
    for field in kind.model_fields.values():
        inner = section_of(field.annotation) or named_section_of(field.annotation)
        declared |= declared_needs(inner) if inner is not None else set()
    return declared

"""Derived recipes: `but` and `model_copy` validate like recipe files and the command line, and files may build on each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.base.error_text import validation_text
from agentrl.cli.project import init_project
from agentrl.cli.running import load_recipe
from agentrl.config import CriticConfig, LearnerConfig, PolicyConfig, Recipe, TasksConfig
from agentrl.errors import RecipeError

ROOT = Path(__file__).resolve().parents[2]
BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"), learner=LearnerConfig(lr=3e-4))


def test_a_recipe_is_derived_by_overrides_by_mappings_and_by_keywords() -> None:
    new = BASE.but("learner.lr=1e-4", {"rollout.group.size": 4, "tasks.family.options": {"lines": 60}}, name="y", steps=3)
    assert (new.learner.lr, new.rollout.group.size, new.tasks.family.options, new.name, new.steps) == (1e-4, 4, {"lines": 60}, "y", 3)
    assert new.but({"learner.lr": 3e-4, "rollout.group.size": 8, "tasks.family.options": {}}, name="x", steps=16) == BASE
    assert BASE.learner.but(lr=1e-4) == new.learner and BASE.but() == BASE
    assert BASE.but(learner=LearnerConfig(ranks=2)).learner == LearnerConfig(ranks=2)
    assert BASE.but("objective.advantage=gae", critic=CriticConfig(lr=0.5)).critic == CriticConfig(lr=0.5)
    assert BASE.learner.lr == 3e-4


def test_one_item_of_a_mapping_is_changed_and_the_others_stay() -> None:
    practice = BASE.but({"tasks.practice": {"a": 1}}).but("tasks.practice.b=2", "tasks.practice.a=3").tasks.practice
    assert practice == {"a": 3, "b": 2}
    with pytest.raises(RecipeError, match=r"tasks\.practice: expected a mapping, got 3"):
        BASE.but({"tasks.practice": 3, "tasks.practice.a": 1})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stesp": 3}, r"^stesp: unknown key; did you mean steps\? known here: capture, cluster, critic, device, "),
    ({"learner.lrr": 1.0}, r"^learner\.lrr: unknown key; did you mean lr\? known here: "),
    ({"lerner.lr": 1.0}, r"^lerner: unknown section; did you mean learner\? known here: capture, cluster, critic, evaluation, "),
    ({"steps": 1.5}, r"^steps: Input should be a valid integer"),
    ({"steps.x": 1}, r"^steps\.x: steps has no keys\n  fix: set the key itself: steps=VALUE"),
    ({"learner": 3, "learner.lr": 1.0}, r"^learner: expected a section, got 3"),
    ({"learner": {"lrr": 1.0}}, r"^learner\.lrr: unknown key; did you mean lr\?"),
    ({"learner": CriticConfig()}, r"learner\.gamma: unknown key; known here: "),
    ({"objective.kl": "k3"}, r"^objective: kl and kl_coef go together"),
    ({"rollout.group.branches": 3}, r"rollout\.group: .*must be a multiple of branches=3"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_changes_that_are_invalid_in_a_recipe_file_are_invalid_in_but_and_model_copy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        BASE.but(changes)
    with pytest.raises(RecipeError, match=message):
        BASE.model_copy(update=changes)


@pytest.mark.parametrize(("changes", "text"), [({"stesp": 3}, "did you mean"), ({"lr": -1.0}, "greater than 0"), ({"lr": "x"}, "number")])
def test_a_copy_of_a_section_is_validated_too(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=rf"{next(iter(changes))}: .*{text}"):
        BASE.learner.model_copy(update=changes) if text != "did you mean" else BASE.model_copy(update=changes)
    assert BASE.learner.model_copy() == BASE.learner and BASE.model_copy(deep=True) == BASE


def test_the_error_for_a_misspelled_key_suggests_the_right_one() -> None:
    with pytest.raises(ValidationError) as error:
        Recipe(name="x", stesp=3, seed=-1, policy={"modle": "m"}, tasks=TasksConfig(family="f:F"))  # type: ignore[call-arg, arg-type]
    assert "unknown key; did you mean steps? known here: capture, cluster, critic, " in str(error.value)
    lines = validation_text(error.value).splitlines()
    assert lines[:3] == [
        "seed: Input should be greater than or equal to 0 (got -1)",
        "policy.model: Field required",
        "policy.modle: unknown key; did you mean model? known here: chat_template, dtype, max_model_len, model,"
        " rewritten_context, tool_format",
    ]
    assert lines[3].startswith("stesp: unknown key; did you mean steps? known here: capture, cluster, critic, ") and len(lines) == 4
    with pytest.raises(ValidationError) as error:
        LearnerConfig(lrr=3)  # type: ignore[call-arg]
    assert validation_text(error.value).startswith("LearnerConfig.lrr: unknown key; did you mean lr? known here: gradient_checkpointing, ")


@settings(max_examples=40)
@given(st.text(max_size=12).filter(lambda key: key.partition(".")[0] not in Recipe.model_fields), st.integers())
def test_an_unknown_key_is_never_accepted(key: str, value: int) -> None:
    for derive in (BASE.but, lambda changes: BASE.model_copy(update=changes)):
        with pytest.raises(RecipeError):
            derive({key: value})


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "steps": st.integers(4, 9),
            "learner.lr": st.floats(1e-9, 1),
            "rollout.group.size": st.integers(2, 16),
            "sandbox.backend": st.sampled_from(["auto", "docker"]),
            "learner.lora.rank": st.integers(1, 8),
            "evaluation.every": st.integers(0, 3),
        },
    )
)
def test_but_and_the_command_line_give_the_same_recipe(changes: dict[str, Any]) -> None:
    """A mapping, overrides in text, successive changes, and the saved file all give the same recipe."""
    derived = BASE.but(changes)
    assert derived == BASE.but(*(f"{key}={json.dumps(value)}" for key, value in changes.items()))
    sequential = BASE
    for key, value in changes.items():
        sequential = sequential.but({key: value})
    assert derived == sequential == Recipe.model_validate_json(derived.model_dump_json())


def test_derived_recipes_of_the_repository_contain_only_their_changes() -> None:
    _, base = load_recipe(ROOT / "recipes" / "quickstart.py", [])
    _, lora = load_recipe(ROOT / "recipes" / "quickstart_lora.py", ["learner.lora.rank=4"])
    assert lora.but(name="quickstart", learner=base.learner) == base
    assert lora.learner.lora is not None and lora.learner.lora.rank == 4


def agentrl(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=project, env=environment, text=True, capture_output=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_a_derived_recipe_in_a_new_project_can_be_loaded(tmp_path: Path) -> None:
    """Its base refers to a family by file. The result is the same as with overrides of the base."""
    project = tmp_path / "mine"
    init_project(project, "mine")
    (project / "recipes" / "near.py").write_text(
        "from recipes.quickstart import recipe as base\n"
        'recipe = base.but("learner.lr=1e-4", {"tasks.family": "./fam.py:Fam"}, name="near")\n'
    )
    (project / "recipes" / "nearer.py").write_text('from recipes.near import recipe as base\nrecipe = base.but(name="nearer", steps=2)\n')
    (project / "fam.py").write_text(
        "from sandboxes.tables import Tables\nclass Fam(Tables):\n    name = 'near-tables'\n"  # in the project, by a relative reference
    )
    code = """
import sys
from pathlib import Path
from agentrl.cli.running import load_recipe
from agentrl.task import open_family
root, recipe = load_recipe(Path(sys.argv[1]), ["steps=3"])
print(root.name, recipe.name, recipe.steps, recipe.learner.lr, open_family(recipe.tasks, seed=0, root=root).name)
"""
    result = agentrl(project, "-c", code, "recipes/nearer.py")
    assert result.stdout.split() == ["mine", "nearer", "3", "0.0001", "near-tables"], result.stderr
    (project / "recipes" / "wrong.py").write_text('from recipes.near import recipe as base\nrecipe = base.but("learner.lrr=1")\n')
    result = agentrl(tmp_path, "-m", "agentrl", "train", "mine/recipes/wrong.py")
    assert result.returncode == 2 and "learner.lrr: unknown key; did you mean lr?" in result.stderr


def test_invalid_overrides_raise_a_short_error() -> None:
    base = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
    wrong: Any
    for wrong in (3, None, ["steps=3"], {3: 4}):
        with pytest.raises(RecipeError, match=r"expected a string or a mapping|3 is not a recipe key"):
            base.but(wrong)
    with pytest.raises(RecipeError) as error:
        base.but("steps=" + "9" * 5000)
    assert len(str(error.value)) < 600

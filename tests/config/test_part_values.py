"""Parts in recipes: text, a mapping or `Part`; overrides of options; recipe.json; the comparison with a resumed run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.base.error_text import validation_text
from agentrl.config import ObjectiveConfig, Part, PolicyConfig, Recipe, SandboxConfig, TasksConfig, load
from agentrl.errors import RecipeError
from agentrl.session.folder import check_resumed_recipe, merge_overrides

BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
OWN = BASE.but("objective.loss=mine:loss", "objective.loss.options.beta=2")


def test_text_a_mapping_and_a_part_are_the_same_value() -> None:
    for value in ("mine:loss", {"ref": "mine:loss"}, Part("mine:loss"), Part(ref="mine:loss", options={})):
        loss = ObjectiveConfig(loss=value).loss
        assert (loss, loss.options, str(loss), repr(loss)) == (Part("mine:loss"), {}, "mine:loss", "Part('mine:loss')")
    assert BASE.but({"objective.loss": "mine:loss", "objective.loss.options": {"beta": 2}}) == OWN
    assert BASE.but({"objective.loss": Part("mine:loss", options={"beta": 2})}) == OWN != BASE
    assert BASE.but(objective=ObjectiveConfig(loss={"ref": "mine:loss", "options": {"beta": 2}})) == OWN


def test_a_part_without_options_is_saved_as_text() -> None:
    saved = json.loads(OWN.but(trackers=["terminal", Part("mine:Csv", options={"columns": ["a"]})]).model_dump_json())
    assert saved["objective"]["loss"] == {"ref": "mine:loss", "options": {"beta": 2}} and saved["store"] == "sqlite"
    assert saved["trackers"] == ["terminal", {"ref": "mine:Csv", "options": {"columns": ["a"]}}] and saved["tasks"]["family"] == "f:F"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab. é", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.", max_size=3), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.builds(Part, st.sampled_from(["a:b", "./c.py:d"]), options=st.dictionaries(st.text("abc.-", min_size=1, max_size=4), JSON))


@pytest.mark.slow
@given(st.lists(PARTS, max_size=3), PARTS)
def test_a_recipe_with_options_survives_recipe_json_and_overrides(trackers: list[Part], family: Part) -> None:
    recipe = BASE.but({"tasks.family": family, "trackers": trackers})
    assert recipe.tasks.family == family and recipe.trackers == tuple(trackers)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe == recipe.but()
    assert recipe == BASE.but(f"tasks.family={json.dumps(family.as_data())}", {"trackers": [part.as_data() for part in trackers]})
    single = [f"tasks.family.options.{name}={json.dumps(value)}" for name, value in family.options.items()]
    assert recipe.tasks == BASE.but(*single, {"tasks.family.ref": family.ref}).tasks


def test_overrides_of_a_part_and_its_options_work_in_any_order() -> None:
    overrides = ["objective.loss=mine:loss", "objective.loss.options.beta=2", "objective.loss.options.a.b=[1]"]
    for order in itertools.permutations(overrides):
        assert BASE.but(*order).objective.loss == Part("mine:loss", options={"beta": 2, "a.b": [1]})
    assert ObjectiveConfig().but("loss.options.beta=2", "loss=mine:loss") == OWN.objective
    assert BASE.but({"objective": {"loss": Part("mine:loss")}, "objective.loss.options.beta": 2}) == OWN
    assert OWN.but("objective.loss.options.beta=3", "objective.loss.options.c=x").objective.loss.options == {"beta": 3, "c": "x"}
    assert OWN.but('objective.loss.options={"c": 1}').objective.loss.options == {"c": 1}


def test_another_part_does_not_get_the_options_of_the_previous_one() -> None:
    assert OWN.but("objective.loss=gspo").objective.loss == Part("gspo")
    assert OWN.but("objective.loss=mine:loss").objective.loss == Part("mine:loss")
    assert OWN.but("objective.loss.ref=mine:other").objective.loss == Part("mine:other", options={"beta": 2})
    assert merge_overrides(["store=a:b", "store.options.size=3", "steps=4"], ["store=sqlite"]) == ("steps=4", "store=sqlite")


WRONG = [
    ("store=3", r"^store: expected a string, or a mapping such as \{\"ref\": .* \(got 3\)"),
    ("store=null", r"^store: expected a string, or a mapping .* \(got None\)"),
    ('store=["a:b"]', r"^store: expected a string, or a mapping"),
    ('store=""', r"^store\.ref: String should have at least 1 character"),
    ("store={}", r"^store\.ref: Field required"),
    ('store={"options": {"a": 1}}', r"^store\.ref: Field required"),
    ('store={"ref": 3}', r"^store\.ref: Input should be a valid string \(got 3\)"),
    ('store={"ref": "a:b", "optons": {}}', r"^store\.optons: unknown key; did you mean options\? known here: options, ref"),
    ('objective.loss={"ref": "a:b", "beta": 2}', r"^objective\.loss\.beta: unknown key; known here: options, ref"),
    (
        "objective.loss.beta=2",
        r"^objective\.loss\.beta: unknown key; known.*\n  fix: write an option as objective\.loss\.options\.NAME=VALUE",
    ),
    ("objective.los.options.beta=2", r"^objective\.los: unknown section; did you mean loss\?"),
    ("objective.loss.ref.a=2", r"^objective\.loss\.ref\.a: unknown key"),
    ("objective.loss.options=2", r"^objective\.loss\.options: Input should be a valid dictionary \(got 2\)"),
    ('objective={"loss": {"ref": "a:b", "options": []}}', r"^objective\.loss\.options: Input should be a valid dictionary"),
    ('trackers=["terminal", {"ref": "a:b", "option": {}}]', r"^trackers\[1\]\.option: unknown key; did you mean options\?"),
    ("trackers=terminal", r"^trackers: Input should be a valid tuple"),
    ("trackers.options.a=1", r"^trackers\.options\.a: trackers has no keys"),
    ('tasks.family={"ref": "f:F", "options": {"a": NaN}}', r"^tasks\.family\.options\.a.*: Input should be a finite number"),
    ("tasks.family.options.api_key=x", r"tasks\.family\.options\.api_key contains a secret by value"),
]


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_a_wrong_part_raises_an_error_that_names_the_key(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        BASE.but(override)


def test_other_wrong_values_of_options_raise_an_error() -> None:
    for section, key in (("objective", "objective.loss"), ("tasks", "tasks.family")):
        with pytest.raises(RecipeError, match=r"objective\.loss=clip accepts no options|tasks\.family\.ref: Field required"):
            BASE.but({section: {}, f"{key}.options.a": 1})
    with pytest.raises(RecipeError, match=r"^tasks\.family\.options: expected a mapping, got 3"):
        BASE.but({"tasks.family.options": 3, "tasks.family.options.a": 1})
    with pytest.raises(RecipeError, match=r"^store\.options\.what: input was not a valid JSON value"):
        BASE.but(store={"ref": "a:b", "options": {"what": object()}})
    with pytest.raises(ValidationError, match="Unexpected keyword argument"):
        Part("a:b", optons={})  # type: ignore[call-arg]


def test_an_error_does_not_repeat_the_options_which_may_be_secret() -> None:
    part = Part("auto", options={"api_key": "pLanted7xQ"})
    for make in (lambda: SandboxConfig(backend=part), lambda: SandboxConfig(backend=part.as_data())):
        with pytest.raises(ValidationError) as error:
            make()
        assert "pLanted7xQ" not in f"{error.value} {validation_text(error.value)}"


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("sandbox.backend=mine:B", "sandbox.backend auto -> mine:B"),
        ('trackers=["terminal", {"ref": "a:b", "options": {"c": 1}}]', "trackers ('terminal', 'tensorboard') -> "
         "('terminal', {'ref': 'a:b', 'options': {'c': 1}})"),
        ("objective.loss.options.beta=3", "--resume: the recipe differs from the run's: objective.loss.options.beta 2 -> 3"),
        ("objective.loss=clip", "objective.loss mine:loss -> clip; objective.loss.options.beta 2 -> None"),
    ],
)  # fmt: skip
def test_a_resumed_run_compares_parts_and_each_option(override: str, change: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(OWN.model_dump_json())
    assert load(tmp_path / "recipe.json") == OWN and check_resumed_recipe(tmp_path, OWN) == []
    after: Any = OWN.but(override)
    if override.startswith("objective"):
        with pytest.raises(RecipeError) as error:
            check_resumed_recipe(tmp_path, after)
        assert change in str(error.value)
    else:
        assert check_resumed_recipe(tmp_path, after) == [change]

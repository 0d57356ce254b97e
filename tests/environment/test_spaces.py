"""Gymnasium spaces as JSON: every sampled action survives a round trip, and an action outside the space is blamed on the policy."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import gymnasium.spaces as g
import jsonschema
import numpy as np
import pytest

from agentrl.environment.spaces import describe_outside, is_inside, schema_of, text_of, value_of
from agentrl.errors import PolicyFault, TaskError

SPACES = [
    g.Discrete(3),
    g.Discrete(3, start=-1),
    g.Box(-1.0, 1.0, (2,), np.float32),
    g.Box(0, 255, (2, 3), np.uint8),
    g.Box(-np.inf, np.inf, (), np.float64),
    g.MultiDiscrete([2, 5, 3]),
    g.MultiDiscrete([[2, 3], [4, 1]], start=[[1, -1], [0, 5]]),
    g.MultiDiscrete([78, 3], dtype=np.int8, start=[50, 0]),  # type: ignore[arg-type]
    g.Discrete(78, start=50, dtype=np.int8),  # type: ignore[arg-type]
    g.MultiBinary(4),
    g.Text(5, min_length=1, charset="abc"),
    g.Tuple((g.Discrete(2), g.Box(0.0, 1.0, (1,)))),
    g.Dict({"go": g.Discrete(2), "how": g.Dict({"far": g.Box(0.0, 9.0, (1,))})}),
    g.Sequence(g.Discrete(4)),
]


def plain(value: Any) -> Any:
    """Returns an action as JSON data."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def as_json(space: Any, value: Any) -> Any:
    if isinstance(space, g.Tuple):
        return {str(number): as_json(part, item) for number, (part, item) in enumerate(zip(space.spaces, value, strict=True))}
    if isinstance(space, g.Dict):
        return {name: as_json(part, value[name]) for name, part in space.spaces.items()}
    return [plain(item) for item in value] if isinstance(space, g.Sequence) else plain(value)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_action_has_a_json_form_that_its_schema_accepts(space: Any) -> None:
    space.seed(0)
    for _ in range(20):
        sampled = space.sample()
        data = json.loads(json.dumps(as_json(space, sampled)))
        jsonschema.validate(data, schema_of(space))
        assert space.contains(value_of(space, data))
        assert is_inside(space, sampled) and text_of(space, sampled) is not None


WRONG = [None, True, "x", 1e400, float("nan"), -7, 99, 10**400, [], [[]], [1, 2, 3, 4, 5, 6, 7], {"a": 1}, {}, [[1, 2], [3]], [None] * 2]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_an_action_outside_the_space_is_blamed_on_the_policy(space: Any) -> None:
    for data in WRONG:
        try:
            jsonschema.validate(data, schema_of(space))
            valid = space.contains(value_of(space, data))
        except jsonschema.ValidationError:
            with pytest.raises(PolicyFault):
                value_of(space, data)
        except PolicyFault:
            continue
        else:
            assert valid


@pytest.mark.parametrize(
    ("space", "data"),
    [
        (g.Box(0, 255, (2,), np.uint8), [300, 0]),
        (g.Box(-128, 127, (1,), np.int8), [-129]),
        (g.Box(0, 2**64 - 1, (1,), np.uint64), [-1]),
        (g.Box(-np.inf, np.inf, (1,), np.float16), [1e15]),
        (g.MultiBinary(2), [256, 1]),
        (g.MultiDiscrete([3, 3], dtype=np.int8), [256, 1]),
    ],
    ids=str,
)
def test_a_number_that_the_type_of_a_space_cannot_represent_is_not_replaced_by_another(space: Any, data: Any) -> None:
    with pytest.raises(PolicyFault, match="outside the range"):
        value_of(space, data)


class MissionSpace(g.Space[str]):
    """A space of another package, such as minigrid."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


def test_an_observation_of_any_space_has_a_text() -> None:
    space = g.Dict({"image": g.Box(0, 9, (2, 2), np.uint8), "mission": MissionSpace()})
    observed = {"image": np.array([[1, 2], [3, 4]], np.uint8), "mission": "go to the door"}
    assert is_inside(space, observed) and text_of(space, observed) == "image: [[1, 2], [3, 4]], mission: go to the door"
    for unknown in (g.Graph(g.Discrete(2), None), g.OneOf((g.Discrete(2), g.Discrete(3)))):
        unknown.seed(0)
        observed = unknown.sample()
        assert is_inside(unknown, observed) and not is_inside(unknown, "x")  # a formatter can show it
        with pytest.raises(TaskError, match=r"cannot be shown as text\n  fix: set tasks\.family\.options\.formatter"):
            text_of(unknown, observed)


@pytest.mark.filterwarnings("ignore:.*Casting input x")
def test_a_list_in_a_space_of_arrays_has_a_text() -> None:
    for space in (g.Box(0.0, 1.0, (2,)), g.MultiDiscrete([2, 2]), g.MultiBinary(2)):
        assert is_inside(space, [0, 1]) and text_of(space, [0, 1]) in ("[0, 1]", "[0.0, 1.0]")


def test_an_unknown_space_and_a_large_observation_are_blamed_on_the_task() -> None:
    for unknown in (g.Graph(g.Discrete(2), None), MissionSpace(), g.Dict({"go": MissionSpace()})):
        with pytest.raises(TaskError, match="no JSON form"):
            schema_of(unknown)
    with pytest.raises(TaskError, match="formatter"):
        text_of(g.Box(0, 255, (84, 84), np.uint8), np.zeros((84, 84), np.uint8))


def test_an_observation_outside_its_space_is_detected() -> None:
    space = g.Box(-1.0, 1.0, (2,), np.float32)
    for outside in (np.array([0, 2], np.float32), np.array([0, np.nan], np.float32), np.zeros(3, np.float32), [0.0, 0.0, 0.0], "x", None):
        assert not is_inside(space, outside)
    assert is_inside(space, np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (g.Box(-1.0, 1.0, (2,), np.float32), np.array([0, 0.5]), r"the observation is float64\[2\] from 0.0 to 0.5, not in Box"),
        (g.Dict({"a": g.Box(0, 1, (1,), np.float32)}), {"a": np.array([7], np.float32)}, r"\['a'\] is float32\[1\] from 7.0 to 7.0"),
        (g.Dict({"a": g.Discrete(2)}), {"b": 1}, "has no key 'a'"),
        (g.Dict({"a": g.Discrete(2)}), {}, "is dict, not in Dict"),
        (g.Tuple((g.Discrete(2), g.Text(3))), (1, 2), r"\[1\] is 2, not in Text"),
        (g.Tuple((g.Discrete(2),)), 1, "is 1, not in Tuple"),
        (g.MultiBinary(2), np.array([], np.int8), r"is int8\[0\], not in MultiBinary"),
        (g.Text(3), None, "is NoneType, not in Text"),
        (g.OneOf((g.Discrete(2),)), (0, 5), "is tuple, not in OneOf"),
        (g.Box(-1.0, 1.0, (2,), np.float32), SimpleNamespace(dtype="torch.float32", shape=(3,)), "is SimpleNamespace, not in Box"),
    ],
)
def test_the_part_that_is_outside_its_space_is_described(space: Any, value: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(describe_outside(space, value))

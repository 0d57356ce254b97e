"""Gymnasium environments, built-in and hostile, as agentrl shows them."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

import gymnasium
import numpy as np
import pytest

from agentrl.environment.gymnasium_environments import GymnasiumEnvironment
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault
from agentrl.records import ToolCall


class Turn(IntEnum):
    left = 0
    right = 1


class Step(Enum):
    left = 0


@pytest.mark.parametrize(
    ("name", "first", "action"),
    [
        ("CartPole-v1", "position 0.027, velocity -0.006, angle 0.036, angular velocity 0.020", "left"),
        ("FrozenLake-v1", "[S]FFF\nFHFH\nFFFH\nHFFG", "down"),
        ("Blackjack-v1", "your sum 15, dealer's card 2, usable ace 0", "hit"),
        ("MountainCar-v0", "position -0.445, velocity 0.000", "none"),
        ("Acrobot-v1", "[1, 0.00555, 0.999, -0.0377, -0.0187, -0.0111]", "right"),
        ("CliffWalking-v1", "o  o", "up"),
        ("Taxi-v4", "+---------+\n|", "pickup"),
    ],
)
def test_discrete_environments_have_readable_texts(name: str, first: str, action: str) -> None:
    environment = GymnasiumEnvironment(name)
    text_at_reset = environment.reset(42)
    if name in ("CartPole-v1", "FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "MountainCar-v0"):
        assert first in text_at_reset
    else:
        assert text_at_reset.count(",") == first.count(",")
    assert environment.actions is not None and action in environment.actions
    text, reward, terminated, truncated = environment.step(action)
    assert text and isinstance(reward, float) and isinstance(terminated, bool) and truncated is False
    environment.close()


def test_a_continuous_action_is_a_checked_call_or_json() -> None:
    environment = GymnasiumEnvironment("Pendulum-v1")
    assert environment.actions is not None and environment.actions[0]["function"]["name"] == "act"  # type: ignore[index]
    environment.reset(0)
    assert environment.step(ToolCall(name="act", arguments={"action": [0.5]}))[1] < 0
    for arguments in ({"action": [3.0]}, {"action": ["a"]}, {"action": 0.5}, {}):
        with pytest.raises(PolicyFault):
            environment.step(ToolCall(name="act", arguments=arguments))
    texts = GymnasiumEnvironment("Pendulum-v1", json_actions=True)
    texts.reset(0)
    assert texts.actions is None and "minimum" in texts.instructions
    assert texts.step("[0.5]")[1] < 0
    for text in ("", "{", "[NaN]", "[" * 100_000):
        with pytest.raises(PolicyFault):
            texts.step(text)


def test_a_limit_on_steps_truncates() -> None:
    environment = GymnasiumEnvironment("MountainCar-v0", max_episode_steps=3)
    environment.reset(0)
    assert [environment.step("left")[2:] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_options_reach_the_environment_and_errors_name_the_fix() -> None:
    environment = GymnasiumEnvironment(
        "FrozenLake-v1", map_name="8x8", is_slippery=False, action_names=["w", "s", "e", "n"], instructions=""
    )
    assert environment.reset(0).count("\n") == 7 and environment.actions == ("w", "s", "e", "n") and not environment.instructions
    assert GymnasiumEnvironment("FrozenLake-v1", formatter="tests.environment.examples:describe").reset(0) == "cell 0"
    for wrong, message in (
        ({"id": "Nope-v0"}, "cannot be created"),
        ({"id": "Nope-v0"}, "fix: correct the id, or write gymnasium:MODULE:ID"),
        ({"id": "Nope/Nope-v0"}, "fix: correct the id, or write gymnasium:MODULE:ID"),
        ({"id": "gymnasium:Nope-v0"}, "fix: use an id that gymnasium registers"),
        ({"id": "Taxi-v3"}, "Please use `Taxi-v4` instead.*\n  fix: correct the id or the options as the error describes"),
        ({"id": "nowhere_at_all:Nope-v0"}, "cannot be imported.*\n  fix: install the package that contains nowhere_at_all"),
        ({"id": "FrozenLake-v1", "action_names": ["a"]}, "1 names, 1 of them different, for 4 actions"),
    ):
        with pytest.raises(PluginError, match=message):
            GymnasiumEnvironment(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"actions": Turn}, ("left", "right")),
        ({"actions": (Turn.left, Step.left)}, ("Turn.left", "Step.left")),
        ({"actions": (Turn.left,)}, ("0", "1")),
        ({"actions": ("left", "right")}, ("0", "1")),
        ({"actions": 2}, ("0", "1")),
        ({"actions": Enum("Values", {"second": 1, "first": 0})}, ("first", "second")),
        ({"actions": Enum("Texts", {"first": "1", "second": []})}, ("first", "second")),
        ({"actions": property(lambda self: {}["before reset"])}, ("0", "1")),
        ({"get_action_meanings": lambda self: None}, ("0", "1")),
        ({"get_action_meanings": lambda self: ["", " FIRE"]}, ("0", "1")),
        ({"get_action_meanings": lambda self: ["NOOP", "FIRE", "FIRE"]}, ("0", "1")),
        ({"get_action_meanings": staticmethod(lambda: ["NOOP", "FIRE"])}, ("NOOP", "FIRE")),
    ],
)
def test_actions_have_the_names_that_the_environment_declares(declared: dict[str, Any], expected: tuple[str, ...]) -> None:
    gymnasium.register(id="Named-v0", entry_point=type("Named", (Liar,), {"step": _echo} | declared))
    try:
        environment = GymnasiumEnvironment("Named-v0")
        environment.reset(0)
        assert environment.actions == expected
        assert [environment.step(name)[1] for name in expected] == [0.0, 1.0]
        assert GymnasiumEnvironment("Named-v0", action_names=["a", "b"]).actions == ("a", "b")
        with pytest.raises(PluginError, match="action_names has 3 names, 2 of them different, for 2 actions"):
            GymnasiumEnvironment("Named-v0", action_names=["a", "b", "b"])
    finally:
        gymnasium.registry.pop("Named-v0")


def _echo(self: Any, action: Any) -> Any:
    return np.zeros(1, np.float32), float(action), False, False, {}


def _needs_a_package(**options: Any) -> Any:
    raise gymnasium.error.DependencyNotInstalled("MuJoCo is not installed, run `pip install mujoco`")


def test_the_error_for_a_missing_dependency_contains_a_fix() -> None:
    gymnasium.register(id="Needs-v0", entry_point=_needs_a_package)
    try:
        with pytest.raises(PluginError, match=r"MuJoCo is not installed.*\n  fix: install the missing package as the error describes"):
            GymnasiumEnvironment("Needs-v0")
    finally:
        gymnasium.registry.pop("Needs-v0")


class Liar(gymnasium.Env[Any, Any]):
    """Declares numbers from 0 to 1, and returns others."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, lie: float = 2.0, reward: Any = 0.0) -> None:
        self.lie, self.reward = lie, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.full(1, self.lie, np.float32), self.reward, False, False, {}


@pytest.mark.parametrize("lie", [2.0, float("nan"), float("inf")])
def test_an_observation_outside_the_declared_space_is_a_fault(lie: float) -> None:
    gymnasium.register(id="Liar-v0", entry_point=Liar, kwargs={"lie": lie})
    try:
        environment = GymnasiumEnvironment("Liar-v0")
        assert environment.actions == ("0", "1") and environment.reset(0) == "[0]"
        with pytest.raises(EnvironmentFault, match=r"the observation is .*, not in Box"):
            environment.step("0")
    finally:
        gymnasium.registry.pop("Liar-v0")


def test_a_reward_that_is_not_a_number_is_a_fault() -> None:
    gymnasium.register(id="Liar-v0", entry_point=Liar, kwargs={"lie": 0.0})
    try:
        for reward in ((1.0, 2.0), "1", None, float("nan")):  # a tuple is the reward of an environment with several agents
            environment = GymnasiumEnvironment("Liar-v0", reward=reward)
            environment.reset(0)
            with pytest.raises(EnvironmentFault, match=r"Liar.step\(\) returned (a|the) reward"):
                environment.step("0")
    finally:
        gymnasium.registry.pop("Liar-v0")

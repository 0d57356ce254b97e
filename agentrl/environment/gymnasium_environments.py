"""Gymnasium environments: `tasks.family="gymnasium:CartPole-v1"`.

A discrete action is one of several strings. Any other action is a call of the tool `act` with a JSON value, which is checked against the
space. The recipe's formatter converts observations to text. If the recipe has no formatter, the environment's rendering
(`render_mode="ansi"`) is used if there is one, and otherwise the default text for the observation space.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

from agentrl.base.error_text import one_line_error
from agentrl.base.installation import install_command
from agentrl.base.user_code import logging_faults, raising_as
from agentrl.environment.base import Environment, number_of
from agentrl.environment.spaces import describe_outside, is_inside, kind_of, schema_of, text_of, value_of
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault
from agentrl.plugins.references import resolve
from agentrl.records import Observation, ToolCall

ACTIONS = {
    "CartPole": ("left", "right"),
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "MountainCar": ("left", "none", "right"),
    "Acrobot": ("left", "none", "right"),
    "LunarLander": ("none", "left", "main", "right"),
}
"""Names of discrete actions, for environments that declare none (see `_action_names`)."""
FEATURES = {
    "CartPole": ("position", "velocity", "angle", "angular velocity"),
    "MountainCar": ("position", "velocity"),
    "MountainCarContinuous": ("position", "velocity"),
    "Pendulum": ("cos angle", "sin angle", "angular velocity"),
    "LunarLander": ("x", "y", "x velocity", "y velocity", "angle", "angular velocity", "left leg", "right leg"),
    "Blackjack": ("your sum", "dealer's card", "usable ace"),
}
"""Names of the numbers in an observation."""
LEGENDS = {
    "FrozenLake": "S is the start, F ice, H a hole, G the goal; [ ] is you.",
    "CliffWalking": "x is you, C the cliff, T the goal.",
    "LunarLander": "The actions are engines. Land at x 0, y 0. A leg is 1 on the ground.",
    "Taxi": "[ ] is your taxi, ( ) the passenger, { } the destination. Pick the passenger up and drop them at the destination.",
}
_COLOUR = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumEnvironment(Environment):
    """A Gymnasium environment.

    Args:
        id: Gymnasium's id, such as `CartPole-v1` or `package.module:Name-v0`. If the id contains a module, the module is imported first.
        formatter: plug-in reference of a function that converts an observation to text, or to an `Observation` with images.
        action_names: names of the discrete actions, in order. Default: the names in `ACTIONS`, otherwise the names that the environment
            declares, otherwise numbers.
        instructions: the system message; None means a default, and an empty string means no system message.
        json_actions: whether actions that are not discrete are JSON text instead of calls.
        options: arguments of `gymnasium.make`.

    Raises `PluginError` if the environment cannot be imported or created, or if an argument is invalid, and `TaskError` if its actions have
    no JSON form.
    """

    def __init__(
        self,
        id: str,
        *,
        formatter: str | None = None,
        action_names: Sequence[str] | None = None,
        json_actions: bool = False,
        instructions: str | None = None,
        **options: Any,
    ) -> None:
        self._name = id.rpartition(":")[2].partition("-v")[0].rpartition("/")[2]
        self._wrapped, self._drawn = self._create(id, options, draw=formatter is None)
        self._format: Callable[[Any], str | Observation] | None = None if formatter is None else resolve(formatter)
        self._space = self._wrapped.action_space
        self._seen = self._wrapped.observation_space
        default = f"{self._name}: choose an action. {LEGENDS.get(self._name, '')}".strip()
        self.instructions = default if instructions is None else instructions
        self._numbers: dict[str, int] = {}
        if kind_of(self._space) == "Discrete":
            count, start = int(self._space.n), int(self._space.start)
            numbers = range(start, start + count)
            names = tuple(action_names or ACTIONS.get(self._name) or self._declared_names(numbers))
            if not action_names and not len(names) == len({*names}) == count:
                names = tuple(map(str, numbers))
            if not len(names) == len({*names}) == count:
                problem = f"action_names has {len(names)} names, {len({*names})} of them different, for {count} actions"
                raise PluginError(problem, fix="give each action a different name")
            self._numbers = dict(zip(names, numbers, strict=True))
            self.actions = names
            return
        schema = schema_of(self._space)
        if not json_actions:
            parameters = {"type": "object", "properties": {"action": schema}, "required": ["action"]}
            self.actions = ({"type": "function", "function": {"name": "act", "description": "Acts.", "parameters": parameters}},)
        elif instructions is None:
            self.instructions += f" Write it as JSON: {json.dumps(schema)}"

    def _declared_names(self, numbers: Sequence[int]) -> tuple[str, ...]:
        names: tuple[str, ...] = ()
        with logging_faults(f"{self._name}: the names of the actions"):  # such as a property that requires a reset
            names = _action_names(getattr(self._wrapped, "unwrapped", None), numbers)
        return names

    def reset(self, seed: int) -> str | Observation:
        """Starts an episode."""
        observation, _ = self._wrapped.reset(seed=seed)
        return self._text(observation)

    def step(self, action: str | ToolCall) -> tuple[str | Observation, float, bool, bool]:
        """Applies an action. Raises `PolicyFault` if the action is not in the action space, and `EnvironmentFault` if the observation is
        not in its space or the reward is not a finite number."""
        observation, reward, terminated, truncated, _ = self._wrapped.step(self._value(action))
        return self._text(observation), number_of(reward, f"{self._name}.step()", "reward"), bool(terminated), bool(truncated)

    def close(self) -> None:
        """Closes the environment."""
        self._wrapped.close()

    def _create(self, id: str, options: dict[str, Any], *, draw: bool) -> tuple[Any, bool]:
        """Returns the wrapped environment, and whether its observations are rendered as text. Raises `PluginError` if it cannot be
        imported, or Gymnasium rejects the id or the options."""
        module, _, name = id.rpartition(":")
        try:
            gymnasium = importlib.import_module("gymnasium")
            if module:
                importlib.import_module(module)
        except ImportError as error:
            fix = f"correct {module}"
            if isinstance(error, ModuleNotFoundError):
                fix = (
                    install_command("gymnasium")
                    if error.name == "gymnasium"
                    else f"install the package that contains {error.name or module}"
                )
            raise PluginError(f"gymnasium:{id} cannot be imported: {error}", fix=fix) from error
        try:
            environment = gymnasium.make(name, disable_env_checker=True, **options)
            if not draw or "render_mode" in options or "ansi" not in environment.metadata.get("render_modes", ()):
                return environment, False
            environment.close()
            return gymnasium.make(name, disable_env_checker=True, render_mode="ansi", **options), True
        except gymnasium.error.Error as error:
            fix = "correct the id or the options as the error describes"
            if isinstance(error, gymnasium.error.NameNotFound | gymnasium.error.NamespaceNotFound):
                no_module = "correct the id, or write gymnasium:MODULE:ID if another package's MODULE registers it"
                fix = f"use an id that {module} registers, or write a class that wraps its environment" if module else no_module
            elif isinstance(error, gymnasium.error.DependencyNotInstalled):
                fix = "install the missing package as the error describes"
            raise PluginError(f"gymnasium:{id} cannot be created: {str(error)[:500]}", fix=fix) from error

    def _value(self, action: str | ToolCall) -> Any:
        if isinstance(action, ToolCall):
            if action.name != "act" or "action" not in action.arguments:
                raise PolicyFault("call act with the argument action")
            return value_of(self._space, action.arguments["action"])
        if self._numbers:
            return self._numbers[action]
        try:
            json_value = json.loads(action)
        except (ValueError, RecursionError) as error:
            raise PolicyFault(f"the action is not JSON: {str(error)[:200]}") from None
        return value_of(self._space, json_value)

    def _text(self, observation: Any) -> str | Observation:
        if not is_inside(self._seen, observation):
            raise EnvironmentFault(
                f"{self._name}: {describe_outside(self._seen, observation)}\n  fix: correct the observation or its space"
            )
        if self._format is not None:
            return self._format(observation)
        if self._drawn:
            return _COLOUR.sub(_mark, self._wrapped.render()).strip()
        features = FEATURES.get(self._name, ())
        if features and len(features) == len(observation):
            spaces = getattr(self._seen, "spaces", None)
            texts = [text_of(space, item) for space, item in zip(spaces, observation, strict=True)] if spaces else map(_three, observation)
            return ", ".join(f"{name} {text}" for name, text in zip(features, texts, strict=True))
        return text_of(self._seen, observation)


def reward_threshold(id: str) -> float | None:
    """Returns the `reward_threshold` in Gymnasium's registry; None if there is none, or if the id or its package is unknown.

    An unknown id causes an error only when an environment is opened. Raises `PluginError` if the id's module fails with an exception other
    than `ImportError`.
    """
    module, _, name = id.rpartition(":")
    try:
        registration = importlib.import_module("gymnasium.envs.registration")
        if module:
            with raising_as(partial(_broken_module, id), but=(ImportError,)):
                importlib.import_module(module)
    except ImportError:
        return None
    try:
        namespace, name, version = registration.parse_env_id(name)
        if version is None:
            version = registration.find_highest_version(namespace, name)
        threshold = registration.spec(registration.get_env_id(namespace, name, version)).reward_threshold
    except importlib.import_module("gymnasium.error").Error:
        return None
    known = isinstance(threshold, int | float) and math.isfinite(threshold)
    return float(threshold) if known else None


def _broken_module(id: str, error: BaseException) -> PluginError:
    return PluginError(f"gymnasium:{id} cannot be imported: {one_line_error(error)}", fix="correct its module")


def _action_names(environment: Any, numbers: Sequence[int]) -> tuple[str, ...]:
    """Returns the names that an environment declares for its discrete actions, in order, as Atari (`get_action_meanings()`), MiniGrid and
    NetHack (`actions`, members of enumerations) do. Empty if it declares none, or if a name is empty or has white space at its ends."""
    if callable(meanings := getattr(environment, "get_action_meanings", None)):
        names = tuple(map(str, meanings()))
        return names if all(name and name == name.strip() for name in names) else ()
    actions = getattr(environment, "actions", ())
    if not isinstance(actions, tuple | list | type(Enum)) or not all(isinstance(action, Enum) for action in actions):
        return ()
    if isinstance(actions, type) and all(action.value in numbers for action in actions):
        # The values are the actions, but the members may have any order.
        actions = sorted(actions, key=lambda action: numbers.index(action.value))
    short = tuple(action.name for action in actions)
    return short if len({*short}) == len(short) else tuple(f"{type(action).__name__}.{action.name}" for action in actions)


def _three(number: float) -> str:
    return f"{number:.3f}"


def _mark(match: re.Match[str]) -> str:
    """Returns a coloured part of a rendering in brackets: ( ) for blue, { } for magenta, [ ] for any other code, such as a background."""
    code, text = match[1].partition(";")[0], match[2]
    first, last = "()" if code == "34" else "{}" if code == "35" else "[]"
    return f"{first}{text}{last}"

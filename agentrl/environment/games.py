"""The base class of user-supplied environments with several roles, and the handle for such an environment that runs in a process of the
pool."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl.environment.base import Environment, flag_of, number_of, text_of
from agentrl.errors import EnvironmentFault
from agentrl.records import Observation, RoleStep

MAX_ROLES = 16

Call = Callable[..., Awaitable[Any]]
"""Runs an operation for one episode in the episode's process. Arguments: the operation's name and its arguments."""


class Game(Environment):
    """An environment with several agents, one in each role. `actions` are strings.

    class Guess(Game):
        roles = ("hider", "seeker")
        actions = ("left", "right")

        def reset(self, seed):
            return {"hider": "Where do you hide the coin?"}

        def step(self, actions):
            if "hider" in actions:
                self.place = actions["hider"]
                return {"seeker": "Where is the coin?"}, {}, False
            right = 1.0 if actions["seeker"] == self.place else -1.0
            return {}, {"seeker": right, "hider": -right}, True

    `reset` returns the observations for the roles that act first. `step` receives the actions of all roles that had to act. `step` returns
    the observations for the roles that act next, rewards for any of the roles, whether the game has terminated, and optionally whether it
    was truncated. Roles whose observations are returned together act at the same time. An `Observation` may list the actions that are
    allowed in the current state.
    """

    pass_threshold = None  # a low score for one role is a high score for another role

    roles: Sequence[str] = ()
    forfeit: float = -1.0  # reward of a role that makes no legal move, which ends the game; the others share the negated reward

    @abc.abstractmethod
    def step(self, actions: dict[str, str]) -> Any:
        """Applies the actions of all roles that had to act. If this method raises `PolicyFault`, all these roles forfeit."""


def roles_of(value: Any, where: str) -> list[str]:
    """Returns the roles that a game declares. Raises `EnvironmentFault` unless they are 2 to `MAX_ROLES` short names."""
    names = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not 2 <= len(set(names)) == len(names) <= MAX_ROLES or not all(isinstance(name, str) and 0 < len(name) <= 80 for name in names):
        raise EnvironmentFault(f"{where}: roles must be 2 to {MAX_ROLES} different names")
    return names


def observations_of(value: Any, roles: Sequence[str], where: str, *, ended: bool) -> dict[str, Observation]:
    """Returns a game's observations by role. Raises `EnvironmentFault` if the observations are invalid, or if there are none and the game
    has not ended."""
    if not isinstance(value, Mapping) or not set(value) <= set(roles) or not (value or ended):
        shown = sorted(map(str, value))[:4] if isinstance(value, Mapping) else type(value).__name__
        raise EnvironmentFault(f"{where} returned observations of {shown} instead of a dictionary for some of the roles {', '.join(roles)}")
    observations = {
        role: Observation(text=text_of(item, where), actions=item.actions if isinstance(item, Observation) else ())
        for role, item in value.items()
    }
    for item in observations.values():
        if len(set(item.actions)) < len(item.actions) or not all(item.actions):
            raise EnvironmentFault(f"{where} returned an observation whose actions are empty or repeated")
    return observations


def role_step_of(value: Any, roles: Sequence[str], where: str) -> RoleStep:
    """Converts the result of a game's `step`, a `RoleStep` or a tuple of 3 or 4 values, to a `RoleStep`. Raises `EnvironmentFault` for a
    value of a different form."""
    if isinstance(value, RoleStep):
        value = (value.observations, value.rewards, value.terminated, value.truncated)
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise EnvironmentFault(f"{where} returned a {type(value).__name__} instead of (observations, rewards, terminated)")
    observations, rewards, terminated, truncated = (*value, False)[:4]
    if not isinstance(rewards, Mapping) or not set(rewards) <= set(roles):
        raise EnvironmentFault(f"{where} returned rewards that are not a dictionary for some of the roles {', '.join(roles)}")
    ended = flag_of(terminated, where, "terminated"), flag_of(truncated, where, "truncated")
    return RoleStep(
        observations=observations_of(observations, roles, where, ended=any(ended)),
        rewards={role: number_of(reward, where, f"reward of {role}") for role, reward in rewards.items()},
        terminated=ended[0],
        truncated=ended[1],
    )


def as_data(observations: Mapping[str, Observation]) -> dict[str, Any]:
    """Returns observations as JSON data."""
    return {role: [item.text, list(item.actions)] for role, item in observations.items()}


def from_data(data: Mapping[str, Any]) -> dict[str, Observation]:
    """Converts the result of `as_data` back to observations."""
    return {role: Observation(text=text, actions=tuple(actions)) for role, (text, actions) in data.items()}


class PooledGame:
    """An `agentrl.protocols.RoleEnvironment` in a process of a pool."""

    resumable = False

    def __init__(self, run: Call, close: Callable[[], Awaitable[None]], opened: Mapping[str, Any], ref: str) -> None:
        self.instructions, self.forfeit, self._ref = str(opened["instructions"]), float(opened["forfeit"]), ref
        self.actions = None if opened["actions"] is None else tuple(opened["actions"])
        if self.actions is not None and not all(isinstance(action, str) for action in self.actions):
            raise EnvironmentFault(f"{ref}: the actions of a game with roles must be strings")
        self.roles = roles_of(opened["roles"], ref)
        self._first, self._run, self._close = from_data(opened["first"]), run, close

    async def reset(self) -> Mapping[str, Observation]:
        """Returns the first observations."""
        return observations_of(self._first, self.roles, f"{self._ref}.reset()", ended=False)

    async def step(self, actions: Mapping[str, str]) -> RoleStep:
        """Applies actions. Raises `PolicyFault` if the rules forbid an action, `TaskError` if the task cannot be played, and
        `EnvironmentFault` if the environment fails."""
        observations, rewards, terminated, truncated = await self._run("step", {"roles": dict(actions)})
        return role_step_of((from_data(observations), rewards, terminated, truncated), self.roles, f"{self._ref}.step()")

    async def close(self) -> None:
        """Closes the environment."""
        await self._close()

"""Protocols for environments, which respond to agents' actions with observations and rewards, and for leagues of past versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from agentrl.protocols.serving import Policy
from agentrl.records import EnvironmentSpec, Observation, RoleStep, Step, ToolCall


class Environment(Protocol):
    """An environment that is opened for one episode.

    `actions` defines what an action is:

    - None: any text, that is, the agent's answer is the action.
    - A sequence of strings, such as `("left", "right")`: one of these strings. Sampling is constrained to these strings.
    - A sequence of function schemas: a call of one of these tools. If the environment also has the attribute `takes_text = True`, an answer
      without a call is an action too.

    Faults: `PolicyFault` means that the rules forbid the action, and `TaskError` means that the task cannot be played. Any other exception,
    or a missed deadline, means that the environment is broken. Only a `PolicyFault` is scored.
    """

    instructions: str  # the agent's system message; empty means none
    actions: Sequence[str] | Sequence[dict[str, Any]] | None

    async def reset(self) -> Observation:
        """Starts the episode and returns the first observation. Called once."""
        ...

    async def step(self, action: str | ToolCall) -> Step:
        """Applies an action."""
        ...

    async def close(self) -> None:
        """Ends the episode and frees its resources. This method is called once, even after a fault."""


class ResumableEnvironment(Environment, Protocol):
    """An environment whose state can be captured between two steps."""

    async def snapshot(self) -> bytes:
        """Returns the environment's state."""
        ...

    async def restore(self, state: bytes) -> Observation:
        """Restores a state and returns the newest observation in that state. Called instead of `reset` when an episode resumes."""
        ...


class RoleEnvironment(Protocol):
    """An environment with several agents, one in each role. `actions` and faults have the same meaning as in `Environment`, but every
    action is a string.

    The roles that receive an observation act next: one role at a time, or several at once. A role's action is not shown to the other roles
    before they act, unless the environment shows it in an observation.
    """

    instructions: str
    actions: Sequence[str] | Sequence[dict[str, Any]] | None
    roles: Sequence[str]
    forfeit: float  # reward of a role that makes no legal move, which ends the episode

    async def reset(self) -> Mapping[str, Observation]:
        """Starts the episode and returns the observations of the roles that act first. Called once."""
        ...

    async def step(self, actions: Mapping[str, str]) -> RoleStep:
        """Applies the actions of all roles that received an observation."""
        ...

    async def close(self) -> None:
        """Ends the episode and frees its resources."""


class Opponent(Protocol):
    """A past version of the policy that plays in an episode. The weights of this version do not change during the episode."""

    @property
    def number(self) -> int:
        """The number of this version."""
        ...

    @property
    def policy(self) -> Policy:
        """The server that samples from this version."""
        ...


class League(Protocol):
    """Past versions of the policy as opponents, and the results of the games against them."""

    def opponent(self) -> AbstractAsyncContextManager[Opponent]:
        """Returns a context manager that yields the current opponent. Raises `ServingError` if no opponent can be served in time."""
        ...

    def record(self, opponent: int, gain: float, *, version: int) -> None:
        """Records a finished game. `gain`: the trained policy's reward minus the opponent's. `version`: version of the trained policy."""


class EnvironmentOpener(Protocol):
    """Opens environments of one kind. One object serves all episodes of a process."""

    async def open(self, spec: EnvironmentSpec) -> Environment:
        """Returns an environment for one episode."""
        ...

    async def close(self) -> None:
        """Frees the resources that episodes share: processes, connections and sessions."""

"""Guards calls to user-supplied environments that run in this process: sets deadlines and assigns the blame for faults."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar, cast

from agentrl.base import user_code
from agentrl.environment.base import actions_of, text_of
from agentrl.environment.pool import TIMEOUT_S
from agentrl.errors import EnvironmentFault, InfrastructureError, PluginError, PolicyFault, TaskError
from agentrl.protocols import Environment, ResumableEnvironment
from agentrl.records import Observation, Step, ToolCall

T = TypeVar("T")


def blaming_environment(what: str) -> AbstractContextManager[None]:
    """Returns a context for user-supplied code that raises `EnvironmentFault` in place of any exception other than `PolicyFault`,
    `TaskError`, `PluginError` or `InfrastructureError`."""
    return user_code.raising_as(
        lambda error: EnvironmentFault(f"{what}: {user_code.describe_error(error, 1500)}"),
        but=(PolicyFault, TaskError, PluginError, InfrastructureError),
    )


async def guarded(call: Callable[[], Awaitable[T]], what: str, timeout_s: float | None = None) -> T:
    """Calls user-supplied code and returns its result. Raises `EnvironmentFault` if there is no result within `timeout_s` (None means
    `TIMEOUT_S`), and the errors of `blaming_environment`."""
    with blaming_environment(what):
        result = await user_code.call_user_code(call, what=what, timeout_s=TIMEOUT_S if timeout_s is None else timeout_s)
    return result


class GuardedEnvironment:
    """A user-supplied environment whose observations and steps are checked."""

    def __init__(self, environment: Environment, ref: str) -> None:
        self.instructions = str(environment.instructions)
        self.actions: Sequence[str] | Sequence[dict[str, Any]] | None = actions_of(environment.actions, ref)
        self.resumable = hasattr(environment, "snapshot") and hasattr(environment, "restore")
        self.takes_text = bool(getattr(environment, "takes_text", False))
        self.policy_user = str(getattr(environment, "policy_user", ""))
        self._environment, self._ref = environment, ref
        self._step_s = float(getattr(environment, "step_s", TIMEOUT_S))

    def play_user(self, user: Callable[[str, Sequence[tuple[str, str]]], Any]) -> None:
        """Sets the function that plays the user; see `agentrl.environment.dialogue`."""
        cast(Any, self._environment).play_user(user)

    async def reset(self) -> Observation:
        """See `agentrl.protocols.Environment`."""
        return self._observation(await guarded(self._environment.reset, f"{self._ref}.reset()", self._step_s))

    async def step(self, action: str | ToolCall) -> Step:
        """See `agentrl.protocols.Environment`."""
        step: object = await guarded(lambda: self._environment.step(action), f"{self._ref}.step()", self._step_s)
        if not isinstance(step, Step):
            raise EnvironmentFault(f"{self._ref}.step() returned {type(step).__name__} instead of a Step")
        text_of(step.note, f"{self._ref}.step()")
        text = text_of(step.observation, f"{self._ref}.step()")
        return step if not step.observation.media else replace(step, observation=Observation(text=text))

    async def snapshot(self) -> bytes:
        """See `agentrl.protocols.ResumableEnvironment`."""
        state: object = await guarded(cast(ResumableEnvironment, self._environment).snapshot, f"{self._ref}.snapshot()")
        if not isinstance(state, bytes):
            raise EnvironmentFault(f"{self._ref}.snapshot() returned {type(state).__name__} instead of bytes")
        return state

    async def restore(self, state: bytes) -> Observation:
        """See `agentrl.protocols.ResumableEnvironment`."""
        restoring = cast(ResumableEnvironment, self._environment).restore
        return self._observation(await guarded(lambda: restoring(state), f"{self._ref}.restore()"))

    async def close(self) -> None:
        """See `agentrl.protocols.Environment`."""
        await guarded(self._environment.close, f"{self._ref}.close()")

    def _observation(self, value: object) -> Observation:
        return Observation(text=text_of(value, self._ref))

"""EnvPool's environments: `tasks.family="envpool:Pong-v5"`. Actions and observations have the same form as in Gymnasium.

Each episode has a pool with one environment, because EnvPool uses the seed with which a pool is created and ignores the seed passed to a
reset.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.base.installation import install_command
from agentrl.environment.gymnasium_environments import GymnasiumEnvironment
from agentrl.errors import PluginError, TaskError

_SEEDS = 2**31  # EnvPool's seeds are int32


class EnvPoolEnvironment(GymnasiumEnvironment):
    """An EnvPool environment. Accepts the arguments of `GymnasiumEnvironment`, but `options` are arguments of `envpool.make_gymnasium`."""

    def _create(self, id: str, options: dict[str, Any], *, draw: bool) -> tuple[Any, bool]:
        try:
            envpool = importlib.import_module("envpool")
        except ImportError as error:
            raise PluginError(f"envpool:{id} needs a package that is not installed: {error}", fix=install_command("envpool")) from error
        settings = {"num_envs": 1, "num_threads": 1, **options}
        if settings["num_envs"] != 1 or "batch_size" in settings or "seed" in settings:
            raise PluginError("agentrl sets num_envs, batch_size and seed of envpool", fix="remove them from tasks.family.options")
        if id not in (known := envpool.list_all_envs()):
            near = difflib.get_close_matches(id, known, n=2) or known[:2]
            raise PluginError(f"EnvPool has no environment {id}", fix=f"use one of its {len(known):,}, such as {' and '.join(near)}")
        try:
            with _no_warnings():
                spec = envpool.make_spec(id, **settings)
                actions, observations = spec.gymnasium_action_space, spec.gymnasium_observation_space
        except Exception as error:  # TypeError for an unknown option, ImportError for a missing library, and others
            raise PluginError(f"envpool:{id} cannot be created: {str(error)[:500]}") from error
        return _Single(lambda seed: envpool.make_gymnasium(id, seed=seed, **settings), actions, observations), False


class _Single:
    """A pool with one environment, with the interface of a Gymnasium environment."""

    def __init__(self, make: Callable[[int], Any], action_space: Any, observation_space: Any) -> None:
        self.action_space, self.observation_space = action_space, observation_space
        self._make = make
        self._pool: Any = None

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Starts an episode in a new pool. Raises `TaskError` if the environment has several players."""
        self.close()
        with _no_warnings():
            self._pool = self._make(seed % _SEEDS)
            observation, info = self._pool.reset()
        if (players := len(info["players"]["env_id"])) != 1:
            raise TaskError(f"the environment has {players} players, but only environments with one player are supported")
        return _first(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Applies an action."""
        import numpy as np

        assert self._pool is not None, "reset() must be called first"
        observation, reward, terminated, truncated, _ = self._pool.step(np.asarray(action)[None])
        return _first(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def close(self) -> None:
        """Closes the pool."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Suppresses warnings, because EnvPool warns if float32 cannot represent the bounds of a space."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first(batch: Any) -> Any:
    """Returns the first item of a batch of observations."""
    return {name: _first(part) for name, part in batch.items()} if isinstance(batch, Mapping) else batch[0]

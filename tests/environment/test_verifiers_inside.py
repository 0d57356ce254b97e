"""The code that runs next to verifiers, with stubs in place of the package. `test_verifiers.py` runs it with the real package."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentrl.environment.host import INSIDE


class StubModule(ModuleType):
    """A package in which each name is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Exception,), {"__class_getitem__": classmethod(lambda cls, item: cls), "name": "trace"})
        setattr(self, name, value)
        return value


class StubFinder(MetaPathFinder, Loader):
    """Finds a `StubModule` for each module of verifiers."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "verifiers" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(INSIDE))
    monkeypatch.setattr(sys, "meta_path", [StubFinder(), *sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("verifiers", *(path.stem for path in INSIDE.glob("*.py")))]:
        del sys.modules[name]


async def test_the_time_limit_of_an_episode_does_not_change_later_episodes() -> None:
    legacy, limits = import_module("verifiers_legacy"), []

    class Env:
        requires_group_rollouts = provides_advantages = False
        max_turns, timeout_seconds = -1, 50.0

        async def run_rollout(self, *arguments: Any, **options: Any) -> dict[str, Any]:
            limits.append((self.max_turns, self.timeout_seconds))
            return {"reward": 1.0}

    legacy.load_environment = lambda package, **arguments: Env()
    config = {"package": "toy", "args": {}, "env": {}, "runtime": "subprocess", "sandboxed": False, "size": 1}
    played = legacy.Legacy(config)
    for solve_s in (30.0, 0.5, 40.0, 90.0):
        params = {"turns": 4, "solve_s": solve_s, "base_url": "http://127.0.0.1:9", "key": "-", "model": "m", "data": {"task": "{}"}}
        assert (await played.play(params, None))["value"] == 1.0
    assert limits == [(4, 30.0), (4, 0.5), (4, 40.0), (4, 50.0)]


@pytest.mark.parametrize("max_bytes", [None, 100])
async def test_a_file_over_the_limit_is_an_error(max_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = import_module("verifiers_sandbox")
    monkeypatch.setattr(sandbox, "FILE_BYTES", 8)
    content = b"12345678"

    class EpisodeCaller:
        async def request(self, method: str, *, argv: list[str], **options: Any) -> dict[str, Any]:
            return {"exit_code": 0, "stdout": base64.b64encode(content[: int(argv[-1])]).decode(), "stderr": ""}

    monkeypatch.setitem(sandbox.CALLERS, "trace", EpisodeCaller())
    runtime = sandbox.EpisodeRuntime(None)
    assert await runtime._read("a", max_bytes) == content and await runtime._read("a", 3) == b"123"
    content += b"9"
    with pytest.raises(sandbox.SandboxError, match="read 'a': over agentrl's limit of 8 bytes"):
        await runtime._read("a", max_bytes)


@pytest.mark.parametrize("rewards", [(1e308, 1e308), (math.nan, 1.0), (math.inf, -math.inf)])
def test_a_mean_reward_that_is_not_finite_is_no_score(rewards: tuple[float, float]) -> None:
    agent = SimpleNamespace(trainable=True, name="agent")
    traces = [
        SimpleNamespace(
            agent=agent,
            reward=reward,
            rewards={"r": SimpleNamespace(value=reward)},
            metrics={},
            last_reply="",
            ok=True,
            errors=[],
            stop_condition="",
        )
        for reward in rewards
    ]
    result = import_module("verifiers_tasksets").result_of(SimpleNamespace(traces=traces, errors=[]), turns=4)
    assert result["value"] is None and result["blame"] == "task" and "is not finite" in result["reason"]

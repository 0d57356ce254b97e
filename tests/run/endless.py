"""The real pipeline with a scripted policy and a learner that publishes a version as soon as it has the groups of a step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from agentrl.config import Recipe
from agentrl.protocols import ExperienceStore
from agentrl.records import GroupUse, PolicyVersion, Split, SwapReport, Task
from agentrl.session.opening import Run
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from agentrl.version import FolderRegistry
from tests.chats import shared_tokenizer
from tests.driving import Family, make_recipe, make_task, opened


def endless_recipe(**changes: Any) -> Recipe:
    """Returns a recipe with steps of one group with two attempts, until the run is stopped."""
    recipe = make_recipe(group={"size": 2}, groups_per_step=1, checkpoint_turns=False)
    return recipe.but({"steps": None, "evaluation.heldout": 0, "evaluation.heldout_real": 0, **changes})


class Numbered:
    """Tasks NAME-0, NAME-1, ... of the kinds even and odd. With `late`, their scores arrive late."""

    def __init__(self, *, seed: int = 0, name: str = "numbered", size: int | None = None, late: bool = False) -> None:
        self.name, self._size, self._late = name, size, late

    def size(self, split: Split) -> int | None:
        return self._size

    def task(self, split: Split, index: int) -> Task:
        task = replace(make_task(index), id=f"{self.name}-{index}", data={"kind": "odd" if index % 2 else "even"})
        return replace(task, verifiers=("rewards.late:late",)) if self._late else task

    def gold(self, task: Task) -> str:
        return ""


class Server:
    """Serves a scripted policy. A swap is immediate."""

    sha256, token_s, cache_use, accepts_requests, loading = "0" * 64, 0.0, None, True, False

    def __init__(self, policy: ScriptedPolicy) -> None:
        self._policy, self._changed = policy, asyncio.Event()

    @property
    def version(self) -> int:
        return self._policy.version

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        self._serve(version)

    async def swap(self, version: PolicyVersion) -> SwapReport:
        self._serve(version)
        return SwapReport(version=version.number, stall_ms=1.0, total_ms=1.0, probe_max_abs_diff=0.0)

    async def wait_version(self, number: int) -> None:
        while self.version < number:
            await self._changed.wait()

    async def watch(self, **_: Any) -> None:
        await asyncio.Event().wait()

    def figures(self) -> dict[str, float]:
        return {}

    def _serve(self, version: PolicyVersion) -> None:
        self._policy.version, self.sha256 = version.number, version.sha256
        self._changed.set()
        self._changed = asyncio.Event()


class Learner:
    """Takes the groups of each step from the store, and publishes a version with the given weights."""

    alive, liveness = True, SimpleNamespace(work="waiting for groups")

    def __init__(self, run: Run, weights: bytes = b"weights") -> None:
        self._run, self._weights = run, weights
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._train())

    async def wait(self, timeout_s: float = 0.0) -> None:
        assert self._task is not None
        await asyncio.wait([self._task])

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    kill = stop

    async def _train(self) -> None:
        order, store, registry = self._run.order, self._run.store, self._run.registry
        newest = registry.latest()
        step, block = 0 if newest is None else newest.number, 0
        while True:
            entries = await store.entries(first=order.block(block).start)
            block = order.first_open_block(entries, before=step, start=block)
            if (indices := order.select(step, entries)) is None:
                await asyncio.sleep(0.001)
                continue
            await store.call(partial(_take, step=step, indices=indices))
            step += 1
            folder = self._run.folder / "versions" / f"{step:06d}"
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(self._weights)
            registry.add(PolicyVersion(number=step, parent=step - 1, folder=f"versions/{step:06d}", sha256=f"{step:064x}"))


def _take(store: ExperienceStore, *, step: int, indices: tuple[int, ...]) -> None:
    store.assign(step, indices)
    store.commit(step, {index: GroupUse(tokens_trained=1) for index in indices}, f"checkpoints/{step + 1:06d}")


@asynccontextmanager
async def endless_run(folder: Path, recipe: Recipe, family: Any = None) -> AsyncIterator[Run]:
    """Opens a run whose `_pipeline` can be called."""
    policy = ScriptedPolicy.saying(shared_tokenizer(), "42")
    policy.prompts = cast(Any, deque(maxlen=1))
    sandboxes = ScriptedSandboxes(printing(""))
    sandboxes.opened = cast(Any, deque(maxlen=1))
    async with opened(folder, policy, sandboxes, recipe, family or Family()) as run:
        run.registry = registry = FolderRegistry(folder / "versions")
        if registry.get(0) is None:
            registry.add(PolicyVersion(number=0, parent=None, folder="versions/000000", sha256="0" * 64))
        run.served = cast(Any, Server(policy))
        run.learner = cast(Any, Learner(run))
        yield run


async def steps_done(run: Run, count: int) -> None:
    """Waits until the version that the learner published after `count` steps serves."""
    await asyncio.wait_for(run.served.wait_version(count), 60)

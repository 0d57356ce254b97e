"""A user-supplied backend whose snapshots a run needs is tested once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import RecipeError, UserError
from agentrl.records import Task
from agentrl.session.preflight import check_delegation, check_snapshots
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import ScriptedSandbox, printing
from tests.episodes import task

__all__ = ["task"]

BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F")).but({"sandbox.backend": "mine:Backend"})
OWN = {"rollout.agent": "delegating", "rollout.delegation.sandbox": "own", "rollout.concurrency": 7}


class NoSnapshot(ScriptedSandbox):
    async def snapshot(self) -> bytes:
        raise NotImplementedError("not yet")


class Backend(ScriptedSandboxes):
    """A backend with one of several faulty snapshots, or a working one."""

    def __init__(self, behaviour: str) -> None:
        super().__init__(printing(""))
        self.behaviour = behaviour

    async def open(self, spec: Any, *, files: Any = None, snapshot: Any = None, timeout_s: float = 60.0) -> Any:
        restored = b"{}" if snapshot is not None and self.behaviour == "forgets" else snapshot
        sandbox = await super().open(spec, files=files, snapshot=restored, timeout_s=timeout_s)
        if self.behaviour == "cannot":
            sandbox = self.opened[-1] = NoSnapshot(sandbox.id, printing(""), sandbox.files)
        return sandbox


@pytest.mark.parametrize(
    ("behaviour", "message"), [("cannot", "NotImplementedError: not yet"), ("forgets", "a file in it is missing"), ("works", None)]
)
async def test_snapshots_of_a_backend_are_tested_before_a_run_needs_them(behaviour: str, message: str | None, task: Task) -> None:
    for key, changes in {
        "rollout.delegation.sandbox=own": OWN,
        "rollout.checkpoint_turns": {"rollout.checkpoint_turns": True},
        "rollout.group.branches": {"rollout.group.branches": 2},
    }.items():
        recipe, backend = BASE.but(changes), Backend(behaviour)
        if message is None:
            await check_snapshots(recipe, task, backend)
        else:
            with pytest.raises(UserError, match=rf"{key} needs copies .* sandbox\.backend=mine:Backend does not create them: .*{message}"):
                await check_snapshots(recipe, task, backend)
        assert backend.opened and all(sandbox.closed for sandbox in backend.opened)
    backend = Backend(behaviour)
    await check_snapshots(BASE, task, backend)
    await check_snapshots(BASE.but({**OWN, "sandbox.backend": "docker"}), task, backend)
    assert not backend.opened, "not needed, or built-in"


def test_sub_agents_without_sandbox_tools_need_no_sandbox() -> None:
    recipe = BASE.but(OWN)
    with pytest.raises(RecipeError, match=r"sandbox=own does nothing: none of rollout\.delegation\.tools"):
        check_delegation(recipe.but({"rollout.delegation.tools": ["submit"]}), root=Path())
    for tools in (["submit", "python"], None):
        check_delegation(recipe.but({"rollout.delegation.tools": tools}), root=Path())

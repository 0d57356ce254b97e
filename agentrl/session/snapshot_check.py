"""Whether somebody's backend makes copies of a working directory, tried once before a run that is built on them."""

from __future__ import annotations

from agentrl.base.error_text import one_line_error
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.plugins import parts
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import Task

_PATH, _DATA = ".agentrl-copy", b"a file that is to be in the copy"


async def check_snapshots(recipe: Recipe, task: Task, sandboxes: SandboxBackend) -> None:
    """Opens a sandbox of the task's from the snapshot of another one, where the recipe asks for that. Backends that ship are not asked.

    Raises `UserError` where a snapshot cannot be made, or does not open into the same files; `InfrastructureError` where no sandbox opens.
    """
    rollout = recipe.rollout
    wanted = {
        "rollout.delegation.sandbox=own": rollout.delegation is not None and rollout.delegation.sandbox == "own",
        "rollout.branching": rollout.branching is not None,
        "rollout.checkpoint_turns": rollout.checkpoint_turns,
    }
    key = next((key for key, on in wanted.items() if on), None)
    if key is None or recipe.sandbox.backend in parts.BACKEND.shipped:
        return
    await sandboxes.prepare(task.sandbox)
    first = await sandboxes.open(task.sandbox, files=task.contents(), timeout_s=recipe.sandbox.open_timeout_s)
    try:
        problem = await _tried(recipe, task, sandboxes, first)
    finally:
        await first.close()
    if problem:
        raise UserError(
            f"{key} needs copies of a working directory, and sandbox.backend={recipe.sandbox.backend} makes none: {problem}",
            fix="write its Sandbox.snapshot() and open(snapshot=...) (agentrl sandbox check tries them), take another backend, or leave"
            f" {key.partition('=')[0]} out",
        )


async def _tried(recipe: Recipe, task: Task, sandboxes: SandboxBackend, first: Sandbox) -> str:
    """What is wrong with a copy of the first sandbox's working directory; empty: nothing."""
    await first.write(_PATH, _DATA)
    try:
        archive = await first.snapshot()
        second = await sandboxes.open(task.sandbox, snapshot=archive, timeout_s=recipe.sandbox.open_timeout_s)
    except Exception as error:  # a backend of somebody's may raise anything
        return one_line_error(error)
    try:
        found = await second.read(_PATH, max_bytes=2 * len(_DATA))
        return "" if found == _DATA else "a file of it has other content"
    except (FileNotFoundError, ValueError) as error:
        return f"a file of it is missing: {one_line_error(error)}"
    finally:
        await second.close()

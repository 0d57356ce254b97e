"""A one-turn form of any family with the tool `python`: the policy submits a program, and the program's output is scored.

No tool answers, so an episode has one completion, which is the case that most trainers are built for. The program runs after the episode,
in a sandbox of the verifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.agent import ToolOutcome, load_tools
from agentrl.config import Part, TasksConfig
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import Episode, Limits, Score, Split, Task
from agentrl.reward import TaskScorer
from agentrl.task import open_family

ROOT = Path(__file__).resolve().parents[2]
HAND_IN = "benchmarks.contest.single:hand_in"
PRINTED = "benchmarks.contest.single:printed"
_JUDGES = "judges of what is printed"  # key in the task data for the verifiers of the family


class HandIn:
    """Has the schema of the tool `python`, but ends the episode: the program is the answer."""

    name = "python"
    needs_sandbox = False
    schema: Mapping[str, Any] = load_tools(("python",))["python"].schema

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        code = arguments.get("code")
        if not isinstance(code, str):
            return ToolOutcome(output='error: python needs {"code": "..."}', ok=False)
        return ToolOutcome(output="handed in", ok=True, answer=code)


class Printed:
    """A `SandboxVerifier`: runs the submitted program with the task's files, and scores its output with the family's verifier."""

    needs_sandboxes = True

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        if episode.answer is None:
            return Score(value=0.0, evidence="no program was submitted")
        sandbox = await sandboxes.open(task.sandbox, files=task.contents())
        try:
            ran = await sandbox.python(episode.answer, timeout_s=task.limits.tool_timeout_s)
        except (ValueError, TypeError) as error:  # text that is not a program
            return Score(value=0.0, evidence=f"the program cannot be run: {error}")
        finally:
            await sandbox.close()
        answer = ran.stdout.strip() if ran.ok else None
        judged = replace(task, verifiers=tuple(task.data[_JUDGES]))
        return await TaskScorer(sandboxes=sandboxes)(judged, replace(episode, answer=answer))


hand_in = HandIn()
printed = Printed()


class SingleTurn:
    """The tasks of another family in one turn. `of` is that family's `tasks.family`; the other options are passed to it."""

    def __init__(self, seed: int = 0, *, of: str, **options: Any) -> None:
        self._family = open_family(TasksConfig(family=Part(of, options=options)), seed=seed, root=ROOT)
        self.name = f"{self._family.name}, single turn"

    def size(self, split: Split) -> int | None:
        return self._family.size(split)

    def task(self, split: Split, index: int) -> Task:
        task = self._family.task(split, index)
        return replace(
            task,
            tools=tuple(HAND_IN if name == "python" else name for name in task.tools),
            verifiers=(PRINTED,),
            data={**task.data, _JUDGES: list(task.verifiers)},
            limits=replace(task.limits, turns=1),
        )

    def gold(self, task: Task) -> str:
        return self._family.gold(task)

"""The driver's rollouts without server and learner: the real loop, store and groups with a scripted policy.

    python -m tests.driving RUN_DIR BACKEND STALL

runs one step of groups. The policy never answers turn STALL; -1 answers every turn. `journal.jsonl` has the samples.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from agentrl.config import Recipe, build
from agentrl.experience import BlockStarts, DriverStore, FolderCheckpoints, GroupOrder, SqliteStore
from agentrl.failure import Capture, FaultRate, Quarantine
from agentrl.memory.run_memory import open_memory
from agentrl.observe import RunTracker, StageClock
from agentrl.observe.run_events import EpisodeEvents, EventTracker, Record
from agentrl.protocols import Policy, SandboxBackend
from agentrl.records import Completion, Episode, ExecResult, Limits, Message, SandboxSpec, Score, Split, Task
from agentrl.rollout import Admission
from agentrl.run import loop
from agentrl.run.late import LateGroups
from agentrl.sandbox import select_backend
from agentrl.session import builders, opening
from agentrl.session.judge_servers import JudgeServers
from agentrl.session.task_changes import open_changes
from agentrl.task import GroupSchedule
from agentrl.task.group_tasks import GroupTasks
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from tests.chats import chat_of, shared_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SPEC = SandboxSpec(image="sandboxes/tables", memory_mb=128, processes=16, disk_mb=16)
NOTE = "import os; note = os.urandom(6).hex(); open('notes', 'a').write(note + chr(10)); print(note)"
READ = "print(open('notes').read())"


class Family:
    """Endless tasks with different names. `broken` replaces some of them by invalid tasks."""

    name = "driving"

    def __init__(self, broken: Callable[[int], Task | None] = lambda index: None) -> None:
        self.broken = broken

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return self.broken(index) or make_task(index)

    def gold(self, task: Task) -> str:
        return READ


def make_task(index: int) -> Task:
    return Task(
        id=f"task-{index}",
        family="driving",
        prompt=(Message(role="user", content=f"Take notes for {index}."),),
        tools=("python", "submit"),
        sandbox=SPEC,
        verifiers=(),
        data={},
        split=Split.TRAIN,
        files={"a.csv": "x\n"},
        limits=Limits(turns=5, turn_tokens=400, episode_tokens=4000, wall_s=600.0),
    )


def say(turn: int, episode: str) -> str:
    """Writes two notes, reads them, and submits; each turn has a random text."""
    call = ("submit", {"answer": "done"}) if turn == 3 else ("python", {"code": READ if turn == 2 else NOTE})
    return f"{os.urandom(4).hex()} <tool_call>\n{json.dumps({'name': call[0], 'arguments': call[1]})}\n</tool_call>"


class Journaled(ScriptedPolicy):
    """Samples with random logprobs and appends each completion to a file that outlives the process."""

    def __init__(self, journal: Path, *, stall: int = -1, script: Callable[[int, str], str] = say) -> None:
        super().__init__(shared_tokenizer(), script)
        self.journal, self.stall = journal, stall

    async def generate(self, prompt_ids: Any, params: Any, *, request_id: str, timeout_s: float) -> Completion:
        if request_id.endswith(f"-{self.stall}"):
            await asyncio.sleep(3600)
        completion = await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        completion = Completion(
            token_ids=completion.token_ids,
            logprobs=tuple(-random.random() for _ in completion.token_ids),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
        )
        with self.journal.open("a") as file:
            file.write(json.dumps({"request": request_id, "ids": completion.token_ids, "logprobs": completion.logprobs}) + "\n")
        return completion


class AlwaysServed:
    """A server at version 0."""

    version, sha256, token_s = 0, "0" * 64, 0.0
    accepts_requests, loading = True, False

    async def wait_version(self, number: int) -> None:
        assert number <= 0


async def score_one(task: Task, episode: Episode) -> Score:
    return Score(value=1.0)


def make_recipe(**rollout: Any) -> Recipe:
    sizes = {"group": {"size": 3}, "groups_per_step": 2, "checkpoint_turns": True}
    return build(
        {
            "name": "driving",
            "steps": 1,
            "policy": {"model": "m", "max_model_len": 4096},
            "tasks": {"family": "a:b"},
            "rollout": {**sizes, **rollout},
        }
    )


@asynccontextmanager
async def opened(
    run_dir: Path,
    policy: Policy,
    sandboxes: SandboxBackend,
    recipe: Recipe,
    family: Family,
    *,
    order: GroupOrder | None = None,
    scorer: Callable[[Task, Episode], Awaitable[Score]] = score_one,
    record: Record = lambda event: None,
) -> AsyncIterator[opening.Run]:
    """Yields a `Run` with real rollouts, without server and learner. `order`: the group order, by default the recipe's.
    `record` receives its events."""
    order = order or GroupOrder.from_recipe(recipe)
    store = await DriverStore.open(partial(SqliteStore, run_dir / "experience.sqlite"))
    tracker = RunTracker(run_dir, [EventTracker(record)])
    checkpoints = FolderCheckpoints(run_dir / "running")
    faults, slots = FaultRate(concurrency=recipe.rollout.concurrency), Admission(recipe.rollout.concurrency)
    chat, listener = chat_of(shared_tokenizer()), EpisodeEvents(record)
    episodes = builders.build_episode_runner(recipe, policy, sandboxes, chat, listener=listener)
    capture = Capture(run_dir, recipe.capture, origin={"run": run_dir.name})
    starts = BlockStarts(order, await store.call(lambda store: store.block_versions()))
    memory = open_memory(recipe, run_dir, store, order, starts)
    changes = open_changes(recipe, run_dir, family, ROOT)
    tasks = GroupTasks(recipe, run_dir, store, GroupSchedule(family, recipe.seed, changes=changes), order, starts)
    try:
        yield opening.Run(
            recipe=recipe,
            folder=run_dir,
            tracker=tracker,
            clock=StageClock(),
            store=store,
            checkpoints=checkpoints,
            quarantine=Quarantine(run_dir),
            capture=capture,
            fault_rate=faults,
            registry=cast(Any, None),
            family=family,
            sandboxes=sandboxes,
            served=cast(Any, AlwaysServed()),
            groups=builders.build_group_runner(
                recipe, episodes, cast(Any, scorer), checkpoints, faults.record_attempt, slots, memory=memory
            ),
            group_tasks=tasks,
            task_changes=changes,
            order=order,
            starts=starts,
            late=LateGroups(folder=run_dir, order=order, store=store, tasks=tasks, capture=capture, tracker=tracker),
            learner=cast(Any, None),
            judges=JudgeServers(recipe, {}, folder=run_dir),
            progress=opening.Progress(stop_at=recipe.step_limit),
            memory=memory,
        )
    finally:
        await sandboxes.close()
        tracker.close()
        capture.close()
        if memory is not None:
            memory.close()
        await store.close()


def scripted(journal: Path) -> SandboxBackend:
    """Sandboxes that print a new text at each call, and record the call in the journal."""

    def answer(code: str) -> ExecResult:
        with journal.open("a") as file:
            file.write(json.dumps({"ran": code}) + "\n")
        return ExecResult(exit_code=0, stdout=os.urandom(6).hex(), stderr="", wall_s=0.0)

    return ScriptedSandboxes(answer)


async def main(run_dir: Path, backend: str, stall: int) -> None:
    journal = run_dir / "journal.jsonl"
    sandboxes = scripted(journal) if backend == "scripted" else select_backend(backend, run_label="driving", root=ROOT)
    async with opened(run_dir, Journaled(journal, stall=stall), sandboxes, make_recipe(), Family()) as run:
        await loop._roll_out(run)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))

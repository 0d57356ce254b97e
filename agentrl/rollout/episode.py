"""Runs one episode, from its first turn to its record: limits, outputs, and the blame for what fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from agentrl.base import user_code
from agentrl.base.error_text import group_members
from agentrl.protocols import Agent, MemoryView, Policy, SandboxBackend, ToolSource
from agentrl.records import Blame, Episode, EpisodeState, Failure, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout.active import ActiveEpisode, TurnListener
from agentrl.rollout.episode_memory import episode_memory
from agentrl.rollout.episode_sandbox import task_files
from agentrl.rollout.faults import failure_from_error
from agentrl.rollout.pace import OutOfTime, Pace
from agentrl.rollout.requests import WALL_LIMIT
from agentrl.task.outputs import CollectedOutputs, collect_outputs, select_files

RequestRouter = Callable[[str, str], AbstractContextManager[object]]
"""Enters a context around the requests of an episode, given its id and its task's key. A router over several servers learns its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes of any task with one policy and one agent. It holds no state of an episode, so many may run at once."""

    agent: Agent
    policy: Policy
    sandboxes: SandboxBackend
    sampling: Sampling
    max_model_len: int
    request_timeout_s: float
    open_timeout_s: float = 60.0
    tools: ToolSource | None = None
    router: RequestRouter = lambda episode_id, task_key: nullcontext()
    pace: Pace = field(default_factory=Pace)  # history of the policy's server in this run

    async def run(
        self,
        task: Task,
        *,
        episode_id: str,
        attempt: int = 0,
        start: EpisodeState | None = None,
        on_turn: TurnListener | None = None,
        memory: MemoryView | None = None,
        on_begin: Callable[[ActiveEpisode], None] = lambda life: None,
    ) -> Episode:
        """Runs one attempt. Anything that breaks becomes a `Failure` in the episode, never an exception or a score.

        Args:
            start: state to continue from. Its turns are kept: none of their tokens is sampled or tokenized again, no tool call is repeated,
                and the sandbox is opened from the snapshot. With the id of `start` the episode is continued; with another id it is a branch
                that inherits the turns (see `agentrl.objective.branches`).
            on_turn: called after every turn except the last.
            memory: earlier episodes' notes that it may read; None disables memory. Notes that it writes are only in its record.
            on_begin: called with the running episode, so that a caller that cancels it can read its progress.

        Raises:
            SandboxUnavailable: this machine cannot open any sandbox of this kind.
            ValueError: `start` belongs to another task.
        """
        if start is not None and start.task_key != task.key:
            raise ValueError(f"the state of episode {start.episode_id} belongs to another task than {task.id!r}")
        life = ActiveEpisode(
            task,
            episode_id=episode_id,
            attempt=attempt,
            start=start,
            policy=self.policy,
            sandboxes=self.sandboxes,
            sampling=self.sampling,
            max_model_len=self.max_model_len,
            request_timeout_s=self.request_timeout_s,
            open_timeout_s=self.open_timeout_s,
            on_turn=on_turn,
            pace=self.pace,
            tools=self.tools,
            memory=episode_memory(memory, start),
        )
        on_begin(life)
        try:
            with self.router(episode_id, task.key):
                stop_reason, collected, failures = await self._attempt(life)
        finally:
            await life.close()
        return Episode(
            id=episode_id,
            task_id=task.id,
            task_key=task.key,
            trajectories=life.record(stop_reason),
            answer=life.answer,
            failures=(*life.failures, *failures),
            attempt=attempt,
            wall_s=life.wall_s,
            sandbox_s=life.sandbox_s,
            outputs=collected.files,
            removed=collected.removed,
            memory=life.memo,
        )

    async def _attempt(self, life: ActiveEpisode) -> tuple[str, CollectedOutputs, tuple[Failure, ...]]:
        """Runs the agent and collects the outputs within the episode's time. Returns stop reason, outputs and failures."""
        limit_s = life.task.limits.wall_s
        nothing, since = CollectedOutputs(files={}), user_code.cancellation_count()
        wall = asyncio.timeout(max(0.0, limit_s - life.spent_s))
        try:
            async with wall:
                stop_reason = life.check_result(await self._act(life, limit_s))
            if stop_reason == WALL_LIMIT and life.out_of_time:
                return _out_of_time(life)
            if not life.task.outputs or life.sandbox_lost:
                return stop_reason, nothing, ()
            life.stage = "collect"
            return stop_reason, *await _collect(life)
        except BaseException as error:
            user_code.reraise_if_fatal(error, since)
            if wall.expired() or all(isinstance(one, OutOfTime) for one in group_members(error)):
                return _out_of_time(life)
            return "failed", nothing, (failure_from_error(error, stage=life.stage, turn=life.turn_count),)

    async def _act(self, life: ActiveEpisode, limit_s: float) -> str:
        """Runs the user-supplied agent. It may ignore cancellation, so its call has a deadline, after which it is abandoned."""
        grace_s = life.task.limits.tool_timeout_s + user_code.GRACE_S  # an agent closes its tools
        return await user_code.call_user_code(
            lambda: self.agent.act(life), what="the agent", timeout_s=limit_s + grace_s, grace_s=grace_s, within=life.requests.stalls
        )


def _out_of_time(life: ActiveEpisode) -> tuple[str, CollectedOutputs, tuple[Failure, ...]]:
    """The end of an episode without time left: no outputs, and no failure if the policy's programs used the time."""
    failure = life.timeout_failure()
    return WALL_LIMIT, CollectedOutputs(files={}), () if failure is None else (failure,)


async def _collect(life: ActiveEpisode) -> tuple[CollectedOutputs, tuple[Failure, ...]]:
    """Collects the declared outputs after the agent's last action. Outputs that the agent made unreadable are the policy's failure."""
    if life.untouched:  # nothing ran, so the files are the task's
        return CollectedOutputs(files=select_files(task_files(life.task), life.task.outputs)), ()
    sandbox = await life.sandbox()
    started = time.monotonic()
    collected = await collect_outputs(sandbox, life.task.outputs)
    life.sandbox_s += time.monotonic() - started
    refused = "; ".join(f"{path}: {reason}" for path, reason in collected.refused.items())
    if not refused:
        return collected, ()
    failure = Failure(stage="collect", blame=Blame.POLICY, kind="outputs_refused", message=refused[:2000], turn=life.turn_count)
    return collected, (failure,)

"""The life of an episode, from its first turn to its record: limits, outputs, and who is to blame for what. What acts is an `Agent`."""

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
"""Around the requests of an episode, by its id and its task's key: whoever spreads them over several servers hears of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes of any task with one policy and one agent. Holds no state of an episode; safe to run many at once."""

    agent: Agent
    policy: Policy
    sandboxes: SandboxBackend
    sampling: Sampling
    max_model_len: int
    request_timeout_s: float
    open_timeout_s: float = 60.0
    tools: ToolSource | None = None
    router: RequestRouter = lambda episode_id, task_key: nullcontext()
    pace: Pace = field(default_factory=Pace)  # of the policy's server, so far in this run

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
        """One attempt. Whatever is broken on the way ends as a `Failure` in the episode, never as an exception or a score.

        Args:
            start: where to go on from instead of beginning. Its turns are kept as they are: no token of them is sampled or tokenized
                again, no tool call made again, and the sandbox is opened from its snapshot. Under its own id an episode is
                continued; under another it is a branch, whose turns so far are inherited (see `agentrl.objective.branches`).
            on_turn: called after every turn that another may follow.
            memory: what it reads of earlier episodes' notes; None: it has no memory. What it writes is in its record alone.
            on_begin: given the running episode, for whoever may cancel it and wants to know what it came to.

        Raises:
            SandboxUnavailable: no sandbox of this kind can be opened on this machine at all.
            ValueError: `start` is the state of another task.
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
        """The agent's turns and the outputs, within the episode's time: stop reason, outputs, and what was broken."""
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
        """What the agent gives: somebody's code, which may mind no cancellation. The wall is its bound, and the earlier one of both."""
        grace_s = life.task.limits.tool_timeout_s + user_code.GRACE_S  # an agent closes its tools
        return await user_code.call_user_code(
            lambda: self.agent.act(life), what="the agent", timeout_s=limit_s + grace_s, grace_s=grace_s, within=life.requests.stalls
        )


def _out_of_time(life: ActiveEpisode) -> tuple[str, CollectedOutputs, tuple[Failure, ...]]:
    """The end of an episode that runs out of time: it has no outputs, and its turns count if the policy is to blame."""
    failure = life.timeout_failure()
    return WALL_LIMIT, CollectedOutputs(files={}), () if failure is None else (failure,)


async def _collect(life: ActiveEpisode) -> tuple[CollectedOutputs, tuple[Failure, ...]]:
    """The declared outputs, after the agent's last action; what it made impossible to take is its own failure, and scored."""
    if life.untouched:  # nothing ran, so the files are what they were
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

"""Runs one episode, from its first turn to its record: limits, outputs, and the blame for failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from agentrl.base import user_code
from agentrl.base.error_text import group_members
from agentrl.protocols import Agent, EpisodeListener, EpisodeMemory, MemoryView, Policy, SandboxBackend, SilentListener, ToolSource
from agentrl.protocols.sandbox import OPEN_TIMEOUT_S
from agentrl.records import Blame, Episode, EpisodeState, Failure, Task
from agentrl.records.episode import NO_NOTES, Memo
from agentrl.records.sampling import Sampling
from agentrl.rollout.active import ActiveEpisode
from agentrl.rollout.episode_sandbox import task_files
from agentrl.rollout.faults import failure_from_error
from agentrl.rollout.hooks import RequestRouter, StartListener, TurnListener
from agentrl.rollout.pace import OutOfTime, Pace
from agentrl.rollout.repeats import SampledTurns
from agentrl.rollout.requests import WALL_LIMIT
from agentrl.task.outputs import CollectedOutputs, collect_outputs, select_files


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes of any task with one policy and one agent. The runner holds no episode state, so many episodes may run at once."""

    agent: Agent
    policy: Policy
    sandboxes: SandboxBackend
    sampling: Sampling
    max_model_len: int
    request_timeout_s: float
    open_timeout_s: float = OPEN_TIMEOUT_S
    tools: ToolSource | None = None
    router: RequestRouter | None = None  # distributes episodes across several servers
    pace: Pace = field(default_factory=Pace)  # request times of the policy's server in this run
    listener: EpisodeListener = field(default_factory=SilentListener)

    async def run(
        self,
        task: Task,
        *,
        episode_id: str,
        attempt: int = 0,
        start: EpisodeState | None = None,
        on_turn: TurnListener | None = None,
        memory: MemoryView | None = None,
        on_start: StartListener = lambda episode: None,
        sampled: SampledTurns | None = None,
    ) -> Episode:
        """Runs one attempt. A fault becomes a `Failure` in the episode, never an exception or a score.

        Args:
            start: state to continue from. Its turns are kept: their tokens are not sampled or tokenized again, no tool call is repeated,
                and the sandbox is opened from the snapshot. If `episode_id` is the id of the state's episode, that episode is continued.
                Otherwise, the new episode is a branch that inherits the turns (see `agentrl.objective.branches`).
            on_turn: called after every turn except the last.
            memory: notes of earlier episodes that the episode may read; None disables memory. Notes that the episode writes are stored only
                in its record.
            on_start: called with the running episode, so that a caller that cancels it can read its progress.
            sampled: completions from earlier attempts. The episode repeats these completions and appends its new completions. None means
                that nothing is repeated.

        Raises:
            SandboxUnavailable: this machine cannot open any sandbox of this kind.
            ValueError: `start` belongs to a different task.
        """
        if start is not None and start.task_key != task.key:
            raise ValueError(f"the state of episode {start.episode_id} belongs to a task other than {task.id!r}")
        episode = ActiveEpisode(
            task,
            self,
            episode_id=episode_id,
            attempt=attempt,
            start=start,
            on_turn=on_turn,
            memory=episode_memory(memory, start),
            sampled=sampled,
        )
        on_start(episode)
        try:
            with self.router.episode(episode_id, task.key) if self.router is not None else nullcontext():
                stop_reason, collected, failures = await self._attempt(episode)
        except BaseException:
            self.listener.cancelled(episode.cancellation_record("cancelled"))
            raise
        finally:
            await episode.close()
        ended = Episode(
            id=episode_id,
            task_id=task.id,
            task_key=task.key,
            trajectories=episode.record(stop_reason),
            answer=episode.answer,
            failures=(*episode.failures, *failures),
            attempt=attempt,
            wall_s=episode.wall_s,
            sandbox_s=episode.sandbox_s,
            outputs=collected.files,
            removed=collected.removed,
            memory=episode.memo,
        )
        self.listener.ended(ended)
        return ended

    async def _attempt(self, episode: ActiveEpisode) -> tuple[str, CollectedOutputs, tuple[Failure, ...]]:
        """Runs the agent and collects the outputs within the episode's time. Returns the stop reason, the outputs and the failures."""
        limit_s = episode.task.limits.wall_s
        nothing, wall = CollectedOutputs(files={}), asyncio.timeout(max(0.0, limit_s - episode.spent_s))
        with user_code.fault_boundary() as fault:
            async with wall:
                stop_reason = episode.check_result(await self._act(episode, limit_s))
            if stop_reason == WALL_LIMIT and episode.out_of_time:
                return _out_of_time(episode)
            if not episode.task.outputs or episode.sandbox_lost:
                return stop_reason, nothing, ()
            episode.stage = "collect"
            return stop_reason, *await _collect(episode)
        assert fault.error is not None
        if wall.expired() or all(isinstance(member, OutOfTime) for member in group_members(fault.error)):
            return _out_of_time(episode)
        return "failed", nothing, (failure_from_error(fault.error, stage=episode.stage, turn=episode.turn_count),)

    async def _act(self, episode: ActiveEpisode, limit_s: float) -> str:
        """Runs the user-supplied agent.

        The agent may ignore cancellation, so its call has a deadline, after which the call is abandoned.
        """
        grace_s = episode.task.limits.tool_timeout_s + user_code.GRACE_S  # time for the agent to close its tools
        return await user_code.call_user_code(
            lambda: self.agent.act(episode), what="the agent", timeout_s=limit_s + grace_s, grace_s=grace_s, within=episode.requests.stalls
        )


def _out_of_time(episode: ActiveEpisode) -> tuple[str, CollectedOutputs, tuple[Failure, ...]]:
    """Returns the result for an episode that used up its time: no outputs, and no failure if the policy's programs used the time."""
    failure = episode.timeout_failure()
    return WALL_LIMIT, CollectedOutputs(files={}), () if failure is None else (failure,)


async def _collect(episode: ActiveEpisode) -> tuple[CollectedOutputs, tuple[Failure, ...]]:
    """Collects the declared outputs after the agent's last action. If the agent made an output unreadable, that is the policy's failure."""
    if episode.untouched:  # nothing ran, so the files are the task's
        return CollectedOutputs(files=select_files(task_files(episode.task), episode.task.outputs)), ()
    sandbox = await episode.sandbox()
    started = time.monotonic()
    collected = await collect_outputs(sandbox, episode.task.outputs)
    episode.sandbox_s += time.monotonic() - started
    refused = "; ".join(f"{path}: {reason}" for path, reason in collected.refused.items())
    if not refused:
        return collected, ()
    failure = Failure(stage="collect", blame=Blame.POLICY, kind="outputs_refused", message=refused[:2000], turn=episode.turn_count)
    return collected, (failure,)


class EmptyMemory:
    """An `EpisodeMemory` without notes.

    Used if a run without memory continues an episode that had a memory, because the context of the episode describes the memory tools.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo

    @property
    def memo(self) -> Memo:
        """The notes in the state from which the episode started."""
        return self._memo

    def note(self, text: str) -> tuple[bool, str]:
        """Accepts a note and discards it."""
        return True, "noted"

    def recall(self, query: str, own: Sequence[str] = (), most: int | None = None) -> tuple[bool, str]:
        """Finds no notes."""
        return True, NO_NOTES


def episode_memory(view: MemoryView | None, start: EpisodeState | None) -> EpisodeMemory | None:
    """Returns the memory of an episode; None if it has none. An episode that continues a state has a memory if and only if the state had
    one."""
    if start is None:
        return None if view is None else view.begin()
    if start.memory is None:
        return None
    return EmptyMemory(start.memory) if view is None else view.begin(start.memory)

"""The view of an episode for a sub-agent with a separate sandbox. Everything else is shared with the episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.protocols import Environment, EpisodeMemory, ExternalRequest, LiveTrajectory, Sandbox, ToolSource
from agentrl.protocols.sandbox import ForwardingSandbox
from agentrl.records import ExecResult, Failure, Message, Parent, Task
from agentrl.rollout.episode_sandbox import EpisodeSandbox

if TYPE_CHECKING:
    from agentrl.rollout.active import ActiveEpisode


class _Fresh(ForwardingSandbox):
    """A sandbox that was opened from a copy of another sandbox's files.

    It never reports its first session as restarted, because the sub-agent had no session in that other sandbox.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._sessions: set[str] = set()

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        result = await super().python(code, timeout_s=timeout_s, output_bytes=output_bytes, session=session)
        if session in self._sessions:
            return result
        self._sessions.add(session)
        return replace(result, restarted=False)


class SubEpisode:
    """A `LiveEpisode` with a separate sandbox. Trajectories, limits, budgets and failures belong to the episode."""

    def __init__(self, episode: ActiveEpisode, workplace: EpisodeSandbox) -> None:
        self.id: str = episode.id
        self.task: Task = episode.task
        self.room: int = episode.room
        self.tools: ToolSource | None = episode.tools
        self.memory: EpisodeMemory | None = episode.memory
        self._episode = episode
        self._workplace = workplace
        self._fresh: _Fresh | None = None

    @property
    def answer(self) -> str | None:
        """The answer that the episode submitted."""
        return self._episode.answer

    @answer.setter
    def answer(self, answer: str | None) -> None:
        self._episode.answer = answer

    async def environment(self) -> Environment:
        """Returns the environment of the episode."""
        return await self._episode.environment()

    @property
    def stage(self) -> str:
        """The episode's current stage, which failures record."""
        return self._episode.stage

    @stage.setter
    def stage(self, stage: str) -> None:
        self._episode.stage = stage

    @property
    def sandbox_lost(self) -> bool:
        """Whether a tool call in the sandbox was interrupted, so that the files are undefined."""
        return self._workplace.lost

    @sandbox_lost.setter
    def sandbox_lost(self, lost: bool) -> None:
        self._workplace.lost = lost

    @property
    def trajectories(self) -> Sequence[LiveTrajectory]:
        """All trajectories of the episode."""
        return self._episode.trajectories

    @property
    def turn_count(self) -> int:
        """The number of finished turns in the episode."""
        return self._episode.turn_count

    @property
    def agent_state(self) -> Mapping[str, Any]:
        """The agent state from which the episode resumed."""
        return self._episode.agent_state

    @property
    def sandbox_opened(self) -> bool:
        """Whether the sandbox was opened."""
        return self._workplace.opened

    def open(self, agent: str, *, parent: Parent | None = None, prompt: Sequence[Message] = (), policy: str = "") -> LiveTrajectory:
        """Opens an additional trajectory of the episode."""
        return self._episode.open(agent, parent=parent, prompt=prompt, policy=policy)

    def external_request(self, at_most: int, *, within_s: float) -> AbstractContextManager[ExternalRequest]:
        """Times a request that the agent sends itself."""
        return self._episode.external_request(at_most, within_s=within_s)

    async def sandbox(self) -> Sandbox:
        """Returns this sub-agent's sandbox. The first call opens the sandbox."""
        sandbox = await self._workplace.sandbox()
        self._fresh = self._fresh or _Fresh(sandbox)
        return self._fresh

    async def working_copy(self) -> bytes | None:
        """Returns a snapshot of this sub-agent's working directory."""
        return await self._workplace.working_copy()

    def sub_episode(self, copy: bytes | None) -> AbstractAsyncContextManager[SubEpisode]:
        """Opens an additional sub-episode."""
        return self._episode.sub_episode(copy)

    def running(self, sandbox: Sandbox | None) -> AbstractContextManager[None]:
        """Measures the time of a tool call."""
        return self._episode.running(sandbox)

    def clip_output(self, output: str) -> str:
        """Truncates tool output to the episode's remaining budget."""
        return self._episode.clip_output(output)

    def add_failure(self, failure: Failure) -> None:
        """Records a tool's failure."""
        self._episode.add_failure(failure)

    async def boundary(self, agent_state: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Marks the boundary between two turns."""
        await self._episode.boundary(agent_state)


@asynccontextmanager
async def open_sub_episode(episode: ActiveEpisode, copy: bytes | None, sandboxes: set[EpisodeSandbox]) -> AsyncIterator[SubEpisode]:
    """See `LiveEpisode.sub_episode`.

    When the episode ends, it closes each sandbox that is still in `sandboxes`, for example because a cancellation interrupted its closing.
    """
    box = EpisodeSandbox(episode, copy)
    sandboxes.add(box)
    try:
        yield SubEpisode(episode, box)
    finally:
        await box.close()
        sandboxes.discard(box)  # not reached if closing was interrupted; then the episode closes the sandbox

"""An episode as an agent has it that works in a sandbox of its own: everything is the episode's but the sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.protocols import EpisodeMemory, ExternalRequest, LiveTrajectory, Sandbox, ToolSource
from agentrl.protocols.forwarding import ForwardingSandbox
from agentrl.records import ExecResult, Failure, Message, Parent, Task
from agentrl.rollout.episode_sandbox import EpisodeSandbox

if TYPE_CHECKING:
    from agentrl.rollout.active import ActiveEpisode


class _Fresh(ForwardingSandbox):
    """A sandbox whose first user had nothing in the one that it was copied from, so that no session of its own is told to be a new one."""

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
    """A `LiveEpisode`. Trajectories, limits, budgets and failures are those of the whole episode."""

    def __init__(self, life: ActiveEpisode, workplace: EpisodeSandbox) -> None:
        self.id: str = life.id
        self.task: Task = life.task
        self.room: int = life.room
        self.tools: ToolSource | None = life.tools
        self.memory: EpisodeMemory | None = life.memory
        self._life = life
        self._workplace = workplace
        self._fresh: _Fresh | None = None

    @property
    def answer(self) -> str | None:
        return self._life.answer

    @answer.setter
    def answer(self, answer: str | None) -> None:
        self._life.answer = answer

    @property
    def stage(self) -> str:
        return self._life.stage

    @stage.setter
    def stage(self, stage: str) -> None:
        self._life.stage = stage

    @property
    def sandbox_lost(self) -> bool:
        return self._workplace.lost

    @sandbox_lost.setter
    def sandbox_lost(self, lost: bool) -> None:
        self._workplace.lost = lost

    @property
    def trajectories(self) -> Sequence[LiveTrajectory]:
        return self._life.trajectories

    @property
    def turn_count(self) -> int:
        return self._life.turn_count

    @property
    def agent_state(self) -> Mapping[str, Any]:
        return self._life.agent_state

    @property
    def sandbox_opened(self) -> bool:
        return self._workplace.opened

    def open(self, agent: str, *, parent: Parent | None = None, prompt: Sequence[Message] = ()) -> LiveTrajectory:
        return self._life.open(agent, parent=parent, prompt=prompt)

    def external_request(self, at_most: int, *, within_s: float) -> AbstractContextManager[ExternalRequest]:
        return self._life.external_request(at_most, within_s=within_s)

    async def sandbox(self) -> Sandbox:
        sandbox = await self._workplace.sandbox()
        self._fresh = self._fresh or _Fresh(sandbox)
        return self._fresh

    async def working_copy(self) -> bytes | None:
        return await self._workplace.working_copy()

    def sub_episode(self, copy: bytes | None) -> AbstractAsyncContextManager[SubEpisode]:
        return self._life.sub_episode(copy)

    def running(self, sandbox: Sandbox | None) -> AbstractContextManager[None]:
        return self._life.running(sandbox)

    def clip_output(self, output: str) -> str:
        return self._life.clip_output(output)

    def add_failure(self, failure: Failure) -> None:
        self._life.add_failure(failure)

    async def boundary(self, agent_state: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        await self._life.boundary(agent_state)


@asynccontextmanager
async def open_sub_episode(life: ActiveEpisode, copy: bytes | None, places: set[EpisodeSandbox]) -> AsyncIterator[SubEpisode]:
    """See `LiveEpisode.apart`. What is in `places` the episode closes when it ends, whatever became of the block."""
    place = EpisodeSandbox(life, copy)
    places.add(place)
    try:
        yield SubEpisode(life, place)
    finally:
        await place.close()
        places.discard(place)  # not where closing was cut short: then the episode does it

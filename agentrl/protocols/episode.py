"""An episode in progress as its agent sees it, and the agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from agentrl.protocols.sandbox import Sandbox
from agentrl.records import Completion, Failure, Message, Parent, Task, ToolResult, Turn
from agentrl.records.limits import Thinking
from agentrl.records.memo import Memo


class LiveTrajectory(Protocol):
    """One line of turns as it grows: an agent says what comes next, the episode samples it, bounds it and keeps it.

    A turn is `sample`, then `add_turn`, then `add_results` where it called tools, then `add_prompt` with what the next turn begins
    with. Turns that something else sampled are added without `sample`.
    """

    @property
    def index(self) -> int:
        """Its place in `LiveEpisode.trajectories`."""

    @property
    def agent(self) -> str:
        """Who speaks in it."""

    @property
    def parent(self) -> Parent | None:
        """The turn and the call that it comes from."""

    @property
    def turns(self) -> Sequence[Turn]: ...

    @property
    def stop_reason(self) -> str:
        """Empty while it goes on."""

    @property
    def tokens(self) -> int:
        """Tokens of its context, those that `add_prompt` has added included. `LiveEpisode.room` is the most there may be."""

    def limit(self) -> str:
        """The stop reason that applies now, `turn_limit`, `wall_limit` or `token_limit`; empty: another turn may be sampled.

        Raises `TaskError` when not even the episode's first turn fits: the task's prompt is too long.
        """

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Token ids that come into the context before the next completion. Nothing is trained on them."""

    async def sample(
        self,
        *,
        stop_token_ids: Sequence[int],
        max_tokens: int | None = None,
        thinking: Thinking | None = None,
        stop: Sequence[str] = (),
        constraint: str = "",
    ) -> Completion:
        """The next completion, given all tokens so far, of at most `max_tokens`. Raises `ServingError`; `RuntimeError` at a `limit`.

        `thinking` ends it at `Limits.thinking_tokens`; `TaskError` for a task with that limit where it is None.

        `stop` are texts that the server may end it at, after the token that completes one; `constraint` is what it must spell.
        """

    def add_turn(self, completion: Completion, message: Message) -> None:
        """Keeps a completion, with its parsed form, as the turn that follows what `add_prompt` has added."""

    def add_results(self, results: Sequence[ToolResult], *, wall_s: float) -> None:
        """What the calls of the last turn gave, and the seconds they took together."""

    def describe(self, agent: str, prompt: Sequence[Message] | None = None) -> None:
        """Says for the record who speaks in it, and what that agent is told, where that is known later or is not the task's prompt."""

    def end(self, stop_reason: str) -> None:
        """Ends it before the episode does, as a sub-agent's or one whose context was restarted."""


class ToolSource(Protocol):
    """What a run knows of tools beside their names, MCP servers among it: made and read in the room `agent` (`load_tools`)."""

    servers: Mapping[str, Any]
    bounds: Mapping[str, Any]
    words: Mapping[str, Any]
    record: Any  # how the tools answered so far (`agentrl.agent.outage_blame.CallRecord`)


class EpisodeMemory(Protocol):
    """The memory of a run as one episode has it: notes to read, the same ones from its first turn to its last, and a place for its own.

    Agents that work side by side share it. Where it cannot be read or written at all it raises `StoreError`.
    """

    @property
    def memo(self) -> Memo:
        """What was written and shown so far."""

    def note(self, text: str) -> tuple[bool, str]:
        """Keeps a note for later episodes: whether it is kept, and what the agent is told."""

    def recall(self, query: str) -> tuple[bool, str]:
        """Finds notes of earlier episodes by words, the newest without a word: whether the query can be looked for, and what is shown."""


class MemoryView(Protocol):
    """One version of a run's memory as the attempts at one task have it."""

    def begin(self, memo: Memo | None = None) -> EpisodeMemory:
        """For one episode. `memo`: what one wrote and was shown up to the state that this one goes on from."""


class ExternalRequest(Protocol):
    """A request of `LiveEpisode.elsewhere`."""

    most: int  # tokens that may be requested
    tokens: int | None  # set to the number that was sampled


class LiveEpisode(Protocol):
    """One attempt at a task as its agent sees it: the tree of trajectories, a sandbox, and what the task allows.

    What it gives is bounded by `task.limits`; what an agent does with it is recorded, and can be captured between two turns.
    """

    id: str
    task: Task
    room: int  # tokens that one trajectory may have: `Limits.episode_tokens`, or what the model takes
    answer: str | None  # what the agent hands in
    stage: str  # what is going on, for a fault that does not tell by itself: chat, tool, ...
    sandbox_lost: bool  # whether a tool was cut short while it used the sandbox, whose files then mean nothing any more
    tools: ToolSource | None  # what the recipe says of tools, for `agentrl.agent.load_tools`
    memory: EpisodeMemory | None  # for `load_tools`, too; None: the recipe has none

    @property
    def trajectories(self) -> Sequence[LiveTrajectory]:
        """All so far, in the order of their beginning. The first is there from the start; one that goes on from a state has turns."""

    @property
    def turn_count(self) -> int:
        """Turns of all trajectories so far."""

    @property
    def agent_state(self) -> Mapping[str, Any]:
        """What the agent gave to the `boundary` at which the state was captured that this episode goes on from; else empty."""

    def open(self, agent: str, *, parent: Parent | None = None, prompt: Sequence[Message] = ()) -> LiveTrajectory:
        """Begins another trajectory.

        Args:
            agent: who speaks in it, such as "search".
            parent: the turn it comes from; with `call` that of a sub-agent, without one that of the same agent in a context of its own.
            prompt: what its agent is told, for the record; its tokens are added with `add_prompt`.

        Raises:
            ValueError: there is no such turn, or no such call in it.
        """

    def external_request(self, at_most: int, *, within_s: float) -> AbstractContextManager[ExternalRequest]:
        """Encloses a request that the agent sends to a server of the policy. Its time counts as sampling, and is compared with that of
        other such requests. `most` is limited to the tokens that the server usually returns within `within_s` and the time left, so that a
        model that never ends is cut off instead of timing out.
        """

    async def sandbox(self) -> Sandbox:
        """The episode's sandbox, opened at the first need. Raises `SandboxError`, or `TaskError` when the task's cannot be made."""

    @property
    def sandbox_opened(self) -> bool: ...  # whether `sandbox` has opened one yet

    async def working_copy(self) -> bytes | None:
        """What the working directory holds, for `apart`; None: what the task's begins with. Raises `ValueError` where too large."""

    def sub_episode(self, copy: bytes | None) -> AbstractAsyncContextManager[LiveEpisode]:
        """The same episode for an agent with a sandbox of its own, which begins with a `working_copy` and ends with the block.

        It is of the task's spec, and `sandbox_lost` is of it alone. Meanwhile the episode has no state that could be captured.
        """

    def running(self, sandbox: Sandbox | None) -> AbstractContextManager[None]:
        """Around what the agent's words have called: its time is the agent's, should the episode run out of it; and the sandbox's."""

    def clip_output(self, output: str) -> str:
        """What the agent may see of a tool's output, so that no more than `Limits.all_output_chars` is shown in all; cuts are marked."""

    def add_failure(self, failure: Failure) -> None:
        """Records what went wrong with a tool; of many, the first ones are kept."""

    async def boundary(self, agent_state: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Says that the episode stands between two turns, where its state may be captured, or branches begin.

        Args:
            agent_state: gives what the agent needs beside the turns to go on from here, as JSON; called only for a capture. A
                `ValueError` means that there is no state here, and is logged; the episode goes on.
        """


class Agent(Protocol):
    """What acts: a loop of turns with tools, one with sub-agents, an outside program. One object for all episodes of a run.

    Sandboxes, limits, faults, outputs and capture are the business of whoever runs it (`agentrl.rollout.EpisodeRunner`).

    A class that never calls `LiveEpisode.boundary` says so with `boundaries = False`; recipes that ask for the states between its turns
    (`rollout.branching`, `rollout.checkpoint_turns`) are then refused. One that does not use the tools of tasks says so with
    `task_tools = False`: recipes that declare any (`tools.mcp`, `tools.bounds`) are refused.
    """

    async def act(self, episode: LiveEpisode) -> str:
        """Acts until it is done, and returns the stop reason of the trajectories that it has not ended itself.

        An exception is a fault of the infrastructure, or the task's where it is a `TaskError` or `PluginError`: what only the policy's
        words provoke must not raise. Cancelled when `Limits.wall_s` has passed.
        """

"""The protocols of an agent, and of an episode in progress as the agent sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from agentrl.protocols.environment import Environment
from agentrl.protocols.sandbox import Sandbox
from agentrl.records import Completion, Failure, Message, Parent, Task, ToolResult, Turn
from agentrl.records.episode import Memo
from agentrl.records.limits import Thinking


class LiveTrajectory(Protocol):
    """A trajectory in progress. The agent decides the next operation; the episode samples, enforces limits and records turns.

    A turn is a call of `sample`, then `add_turn`, then `add_results` if it called tools, then `add_prompt` with the tokens before the next
    completion. Turns that were sampled elsewhere are added without `sample`.
    """

    @property
    def index(self) -> int:
        """The index of the trajectory in `LiveEpisode.trajectories`."""

    @property
    def agent(self) -> str:
        """The name of the trajectory's agent."""

    @property
    def parent(self) -> Parent | None:
        """The turn and the call at which the trajectory started; None for the first trajectory."""

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns of the trajectory so far."""
        ...

    @property
    def stop_reason(self) -> str:
        """Why the trajectory ended; empty while it continues."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the context of the trajectory, including tokens from `add_prompt`. At most `LiveEpisode.room`."""

    def limit(self) -> str:
        """Returns the limit that has been reached: `turn_limit`, `wall_limit` or `token_limit`; empty if another turn may be sampled.

        Raises `TaskError` if the prompt of the task is too long for even one turn.
        """

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the context before the next completion. These tokens are not trained."""

    async def sample(
        self,
        *,
        stop_token_ids: Sequence[int],
        max_tokens: int | None = None,
        thinking: Thinking | None = None,
        stop: Sequence[str] = (),
        constraint: str = "",
    ) -> Completion:
        """Samples the next completion from the context.

        Args:
            stop_token_ids: tokens that end the completion.
            max_tokens: its largest length; None means what the limits allow.
            thinking: needed if the task sets `Limits.thinking_tokens`.
            stop: strings that end it, after the token that completes one of them.
            constraint: grammar of the completion; see `SamplingParams.constraint`.

        Raises:
            ServingError: the server failed.
            TaskError: the task limits thinking, and `thinking` is None.
            RuntimeError: a limit has been reached.
        """

    def add_turn(self, completion: Completion, message: Message) -> None:
        """Records a completion and its parsed form as the next turn."""

    def add_results(self, results: Sequence[ToolResult], *, wall_s: float) -> None:
        """Records the results of the calls of the last turn, and the seconds that they took."""

    def add_last_state(self, token_ids: Sequence[int]) -> None:
        """Records the tokens from which the next turn would have been sampled, if the environment had not truncated the episode."""

    def describe(self, agent: str, prompt: Sequence[Message] | None = None) -> None:
        """Records the agent's name and prompt, if they become known later or differ from the prompt of the task."""

    def end(self, stop_reason: str) -> None:
        """Ends the trajectory before the episode ends, for a sub-agent or after a restart of the context."""


class ToolSource(Protocol):
    """The tools of a run: MCP servers, bounds and wording. `agentrl.agent.load_tools` reads it."""

    servers: Mapping[str, Any]
    bounds: Mapping[str, Any]
    words: Mapping[str, Any]
    record: Any  # results of earlier calls (`agentrl.agent.outage_blame.CallRecord`)


class EpisodeMemory(Protocol):
    """One episode's access to the memory of its run. The notes that it can read do not change during the episode.

    All agents of the episode share this memory. Raises `StoreError` if the memory cannot be read or written.
    """

    @property
    def memo(self) -> Memo:
        """The notes written and read so far."""

    def note(self, text: str) -> tuple[bool, str]:
        """Stores a note for later episodes. Returns whether it was stored, and the reply to the agent."""

    def recall(self, query: str, own: Sequence[str] = (), most: int | None = None) -> tuple[bool, str]:
        """Searches notes of earlier episodes; an empty query returns the newest notes. Returns whether the query is valid, and the reply.

        Args:
            own: notes of this episode, which are shown before the others.
            most: largest number of notes. None means the default of the tool `recall`. With 1, the reply is the text of one note without
                its number.
        """


class MemoryView(Protocol):
    """One version of a run's memory, for the attempts at one task."""

    def begin(self, memo: Memo | None = None) -> EpisodeMemory:
        """Returns the memory of one episode. `memo`: the notes up to the state that the episode resumes from."""


class ExternalRequest(Protocol):
    """A request in `LiveEpisode.external_request`."""

    most: int  # largest number of tokens that may be requested
    tokens: int | None  # set by the caller to the number of sampled tokens


class LiveEpisode(Protocol):
    """An episode in progress, as its agent sees it: the tree of trajectories, the sandbox, and the limits of the task.

    The episode enforces `task.limits` and records what the agent does. The state of an episode can be captured between two turns.
    """

    id: str
    task: Task
    room: int  # largest number of tokens in a trajectory: `Limits.episode_tokens`, or the context length of the model
    answer: str | None  # set by the agent
    stage: str  # current activity (chat, tool, ...), recorded with a fault
    sandbox_lost: bool  # whether a tool was cancelled while it used the sandbox, so that its files are unreliable
    tools: ToolSource | None  # for `agentrl.agent.load_tools`
    memory: EpisodeMemory | None  # None if the run has no memory

    @property
    def trajectories(self) -> Sequence[LiveTrajectory]:
        """All trajectories so far, in the order of their start. The first trajectory exists from the start."""

    @property
    def turn_count(self) -> int:
        """Number of turns in all trajectories so far."""

    @property
    def agent_state(self) -> Mapping[str, Any]:
        """The agent's state if this episode resumes from a captured state; empty otherwise."""

    def open(self, agent: str, *, parent: Parent | None = None, prompt: Sequence[Message] = (), policy: str = "") -> LiveTrajectory:
        """Starts a new trajectory.

        Args:
            agent: name of its agent, such as "search".
            parent: the turn at which it starts. If it has a `call`, the trajectory belongs to a sub-agent, otherwise to the same agent in a
                new context.
            prompt: messages to the agent, for the record. The tokens of the prompt are added with `add_prompt`.
            policy: the player of the trajectory, if it is not trained (`Trajectory.policy`). A new context of the same agent has the policy
                of its parent.

        Raises:
            ValueError: the turn or the call does not exist.
        """

    def external_request(self, at_most: int, *, within_s: float) -> AbstractContextManager[ExternalRequest]:
        """Returns a context for a request that the agent itself sends to a server of the policy. The time of the request counts as
        sampling.

        `ExternalRequest.most` is at most the number of tokens that the server usually returns within `within_s` and the time left, so that
        a model that does not stop is cut off instead of running into a timeout."""

    async def environment(self) -> Environment:
        """Returns the environment of the task, opened by the first call and closed with the episode.

        Raises `EnvironmentFault`, `TaskError` and `PluginError`."""
        ...

    async def sandbox(self) -> Sandbox:
        """Returns the sandbox of the episode, opened by the first call. Raises `SandboxError`, or `TaskError` if its spec is invalid."""

    @property
    def sandbox_opened(self) -> bool:
        """Whether the sandbox has been opened."""
        ...

    async def working_copy(self) -> bytes | None:
        """Returns a snapshot of the working directory for `sub_episode`; None if no sandbox is open.

        Raises `ValueError` if it is too large.
        """

    def sub_episode(self, copy: bytes | None) -> AbstractAsyncContextManager[LiveEpisode]:
        """Returns a context with a view of this episode for a sub-agent with a separate sandbox, which starts from a `working_copy`.

        The sandbox has the spec of the task and is closed at the end. Meanwhile the state of the episode cannot be captured.
        """

    def running(self, sandbox: Sandbox | None) -> AbstractContextManager[None]:
        """Returns a context for a program or tool that the agent called. Its time counts as the agent's time, and the sandbox counts as in
        use."""

    def clip_output(self, output: str) -> str:
        """Cuts tool output so that the episode shows at most `Limits.all_output_chars`, and marks the cut."""

    def add_failure(self, failure: Failure) -> None:
        """Records a failure of a tool. Only the first failures are recorded."""

    async def boundary(self, agent_state: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Marks a point between two turns, where the state may be captured and branches may start.

        Args:
            agent_state: returns the agent's own state as JSON. It is called only for a capture. If it raises `ValueError`, no state is
                captured and the error is logged.
        """


class Agent(Protocol):
    """An agent: a turn loop with tools, a turn loop with sub-agents, or a third-party program. One object serves all episodes of a run.

    `agentrl.rollout.EpisodeRunner` handles sandboxes, limits, faults, outputs and capture.

    A class that never calls `LiveEpisode.boundary` sets `boundaries = False`; recipes that need states between turns
    (`rollout.group.branches`, `rollout.checkpoint_turns`) then raise an error. A class that does not use the tools of tasks sets
    `task_tools = False`; recipes that declare tools (`mcp`, `tools`) then raise an error.
    """

    async def act(self, episode: LiveEpisode) -> str:
        """Runs the episode and returns the stop reason of the trajectories that have not ended.

        An exception counts as an infrastructure fault; `TaskError` and `PluginError` count as faults of the task. No text of
        the policy may cause an exception. The call is cancelled after `Limits.wall_s`.
        """

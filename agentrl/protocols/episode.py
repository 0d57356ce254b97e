"""The protocols for an agent, and for an episode in progress as seen by the agent."""

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
    """A trajectory in progress. The agent decides the next operation. The episode samples, enforces limits and records turns.

    A turn consists of a call to `sample`, then `add_turn`, then `add_results` if the turn called tools, then `add_prompt` with the tokens
    before the next completion. For turns that were sampled elsewhere, `sample` is not called.
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
        """The reason why the trajectory ended; empty while it continues."""

    @property
    def tokens(self) -> int:
        """The number of tokens in the trajectory's context, including tokens from `add_prompt`. At most `LiveEpisode.room`."""

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
            max_tokens: maximum length of the completion; None means as many tokens as the limits allow.
            thinking: how to end thinking; required if the task sets `Limits.thinking_tokens`.
            stop: strings that end the completion, after the token that completes one of them.
            constraint: grammar of the completion; see `SamplingParams.constraint`.

        Raises:
            ServingError: the server failed, or the episode's time has ended.
            TaskError: the task limits thinking, and `thinking` is None; or the prompt of the task is too long.
            PolicyFault: the server rejects a context that contains the policy's text.
            RuntimeError: another limit has been reached, the trajectory has ended, or a turn is already being sampled.
            ValueError: `max_tokens` is below 1.
        """

    def add_turn(self, completion: Completion, message: Message) -> None:
        """Records a completion and its parsed form as the next turn."""

    def add_results(self, results: Sequence[ToolResult], *, wall_s: float) -> None:
        """Records the results of the last turn's tool calls, and the seconds that the calls took."""

    def add_last_state(self, token_ids: Sequence[int]) -> None:
        """Records the tokens from which the next turn would have been sampled if the environment had not truncated the episode."""

    def describe(self, agent: str, prompt: Sequence[Message] | None = None) -> None:
        """Records the agent's name and prompt if they become known only later or if the prompt differs from the task's."""

    def end(self, stop_reason: str) -> None:
        """Ends the trajectory before the episode ends, for a sub-agent or after a restart of the context."""


class ToolSource(Protocol):
    """The tools of a run: MCP servers, bounds and wording. `agentrl.agent.load_tools` reads this object."""

    servers: Mapping[str, Any]
    bounds: Mapping[str, Any]
    words: Mapping[str, Any]
    record: Any  # results of earlier calls (`agentrl.agent.outage_blame.CallRecord`)


class EpisodeMemory(Protocol):
    """An episode's access to the run's memory. The notes that the episode can read do not change while it runs.

    All agents of the episode share this object. Methods raise `StoreError` if the memory cannot be read or written.
    """

    @property
    def memo(self) -> Memo:
        """The notes written and read so far."""

    def note(self, text: str) -> tuple[bool, str]:
        """Stores a note for later episodes. Returns (whether it was stored, reply to the agent)."""

    def recall(self, query: str, own: Sequence[str] = (), most: int | None = None) -> tuple[bool, str]:
        """Searches the notes of earlier episodes, or lists the newest notes if the query is empty. Returns (whether the query is valid,
        reply).

        Args:
            own: this episode's notes, which are shown before other notes.
            most: maximum number of notes. None means the default of the tool `recall`. If `most` is 1, the reply is the text of one note
                without its number.
        """


class MemoryView(Protocol):
    """A version of the run's memory, for the attempts at one task."""

    def begin(self, memo: Memo | None = None) -> EpisodeMemory:
        """Returns the memory of one episode. `memo`: the notes in the state from which the episode resumes, if it resumes."""


class ExternalRequest(Protocol):
    """The token limit and the token count of a request that the agent itself sends (`LiveEpisode.external_request`)."""

    most: int  # maximum number of tokens that may be requested
    tokens: int | None  # set by the caller to the number of sampled tokens


class LiveEpisode(Protocol):
    """An episode in progress as seen by its agent: the tree of trajectories, the sandbox, and the task's limits.

    The episode enforces `task.limits` and records what the agent does. The state of an episode can be captured between two turns.
    """

    id: str
    task: Task
    room: int  # maximum number of tokens in a trajectory: the smaller of `Limits.episode_tokens` and the model's context length
    answer: str | None  # set by the agent
    stage: str  # current activity (chat, tool, ...), recorded with a fault
    sandbox_lost: bool  # whether a tool was cancelled while it used the sandbox, so that the sandbox's files are unreliable
    tools: ToolSource | None  # for `agentrl.agent.load_tools`
    memory: EpisodeMemory | None  # None if the run has no memory

    @property
    def trajectories(self) -> Sequence[LiveTrajectory]:
        """All trajectories so far, in the order in which they started. The first trajectory exists from the beginning."""

    @property
    def turn_count(self) -> int:
        """The number of turns in all trajectories so far."""

    @property
    def agent_state(self) -> Mapping[str, Any]:
        """The agent's state if this episode resumes from a captured state; empty otherwise."""

    def open(self, agent: str, *, parent: Parent | None = None, prompt: Sequence[Message] = (), policy: str = "") -> LiveTrajectory:
        """Starts a new trajectory.

        Args:
            agent: name of the trajectory's agent, such as "search".
            parent: the turn at which the trajectory starts. If `parent.call` is set, the trajectory belongs to a sub-agent, otherwise to
                the same agent in a new context.
            prompt: messages to the agent, only for the record. Add the tokens of the prompt with `add_prompt`.
            policy: the player of the trajectory if it is not trained (`Trajectory.policy`). A new context of the same agent keeps the
                policy of its parent.

        Raises:
            ValueError: the parent's turn or call does not exist.
        """

    def external_request(self, at_most: int, *, within_s: float) -> AbstractContextManager[ExternalRequest]:
        """Returns a context for a request that the agent itself sends to a server of the policy. The time of the request counts as
        sampling.

        `ExternalRequest.most` is at most the number of tokens that the server usually returns within `within_s` and the time left, so that
        a model that does not stop is cut off instead of running into a timeout."""

    async def environment(self) -> Environment:
        """Returns the task's environment. The first call opens the environment, which is closed at the end of the episode.

        Raises `EnvironmentFault` if the environment fails, `TaskError` if the task cannot be played, and `PluginError` if the specification
        does not refer to an environment."""
        ...

    async def sandbox(self) -> Sandbox:
        """Returns the sandbox. The first call opens the sandbox. Raises `SandboxError` if that fails or the episode has ended, `TaskError`
        if the task's sandbox cannot be created, and `SandboxUnavailable` if this machine cannot open any."""

    @property
    def sandbox_opened(self) -> bool:
        """Whether the sandbox has been opened."""
        ...

    async def working_copy(self) -> bytes | None:
        """Returns a snapshot of the working directory for `sub_episode`; None stands for the task's initial files.

        Raises `ValueError` if the snapshot is too large.
        """

    def sub_episode(self, copy: bytes | None) -> AbstractAsyncContextManager[LiveEpisode]:
        """Returns a context manager that yields a view of this episode for a sub-agent, with a separate sandbox opened from `copy`.

        `copy` comes from `working_copy`. The sandbox has the task's specification and is closed when the context exits. Until the context
        exits, the episode's state cannot be captured.
        """

    def running(self, sandbox: Sandbox | None) -> AbstractContextManager[None]:
        """Returns a context for a program or tool that the agent called. The time in the context counts as the agent's time, and the
        sandbox counts as in use."""

    def clip_output(self, output: str) -> str:
        """Truncates tool output so that the episode's total stays within `Limits.all_output_chars`, and marks the position of the omitted
        text."""

    def add_failure(self, failure: Failure) -> None:
        """Records a tool's failure. After 16 recorded failures, an episode drops further failures."""

    async def boundary(self, agent_state: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Marks a point between two turns at which the state may be captured and branches may start.

        Args:
            agent_state: returns the agent's state as a JSON object. `agent_state` is called only if the state is captured. If it raises
                `ValueError`, no state is captured and the error is logged.
        """


class Agent(Protocol):
    """An agent: a turn loop with tools, a turn loop with sub-agents, or a third-party program. One object serves all episodes of a run.

    `agentrl.rollout.EpisodeRunner` handles sandboxes, limits, faults, outputs and capture.

    A class that never calls `LiveEpisode.boundary` sets `boundaries = False`. Recipes that need states between turns
    (`rollout.group.branches`, `rollout.checkpoint_turns`) then raise an error. A class that does not use the tasks' tools sets
    `task_tools = False`. Recipes that declare tools (`mcp`, `tools`) then raise an error.
    """

    async def act(self, episode: LiveEpisode) -> str:
        """Runs the episode and returns the stop reason for the trajectories that have not ended.

        An exception counts as an infrastructure fault, except that `TaskError` and `PluginError` count as task faults. The policy's text
        must never cause an exception. The call is cancelled after `Limits.wall_s`.
        """

"""The verbs of agentrl, as structural types. Implementations live in the rooms; nothing here imports one.

Every wait takes a deadline in seconds and ends with a typed error (`agentrl.errors`) when it passes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentrl.learning import AdvantageEstimator as AdvantageEstimator
from agentrl.learning import Loss as Loss
from agentrl.learning import LossTokens as LossTokens
from agentrl.limits import Thinking
from agentrl.listening import Interval as Interval
from agentrl.listening import Tracker as Tracker
from agentrl.memo import Memo
from agentrl.records import (
    Completion,
    Episode,
    EpisodeState,
    ExecResult,
    Failure,
    Group,
    Message,
    Parent,
    PolicyVersion,
    Probe,
    SamplingParams,
    SandboxSpec,
    Score,
    ScoredEpisode,
    Split,
    SwapReport,
    Task,
    ToolResult,
    Turn,
    VersionState,
)


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place to run programs, used by one episode and then destroyed.

    Paths are relative to the sandbox's working directory; a path that leaves it is refused with `ValueError`. So is every other
    argument that cannot be carried out (NUL, half a surrogate pair, a variable's name with `=`, no program, a deadline that is
    none), before anything happens; an argument of another type raises `TypeError`. An agent's words may be handed on as they are.
    Text stands for bytes as in `os.fsdecode`, so that every name a file can have can be said.
    Faults of the layer raise `SandboxError`/`SandboxTimeout`; a program that fails or runs too long is an `ExecResult`.
    """

    id: str

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Runs a program; after `timeout_s` its whole process tree is killed (`reason="timeout"`)."""

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """Like `exec(["python3", "-I", "-c", code])`, from a warm interpreter: each call starts afresh, without the start-up time.

        With `session`, `code` runs in the interpreter of that name instead, which lives on: later calls find the names of
        earlier ones, and the value of an expression at the end of `code` is printed (its `repr`, unless it is None). Output is
        each call's own. `sys.exit`, a timeout of any program, or a kill for memory ends a session, and `ExecResult` says so;
        the next call starts a fresh one. A sandbox has at most four sessions: `ValueError` for a fifth name, or a wrong one.
        A snapshot does not hold them.
        """

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Bytes of a regular file; never follows a link. `FileNotFoundError`, or `ValueError` when too large."""

    async def write(self, path: str, data: bytes) -> None: ...

    async def snapshot(self) -> bytes:
        """The working directory as a bounded archive that `SandboxBackend.open(..., snapshot=...)` takes.

        Whatever its files and their modes are; `ValueError` when it is too large, and for no other reason.
        """

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Destroys the sandbox and everything in it. Idempotent; never raises for a sandbox that is already gone."""


@runtime_checkable
class SandboxBackend(Protocol):
    """Opens sandboxes of one kind (docker, bubblewrap).

    A factory gets `root`, the folder that `SandboxSpec.image` is relative to, and `run_label`, to mark what a run leaves open.
    """

    name: str

    async def prepare(self, spec: SandboxSpec) -> None:
        """Builds or finds the image (may take minutes the first time); later `open` calls are fast."""

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> Sandbox: ...

    async def close(self) -> None:
        """Closes every sandbox this backend still has open, and the backend."""


class TaskFamily(Protocol):
    """A source of tasks. `task(split, index)` is a pure function of the family's seed, split and index."""

    name: str

    def size(self, split: Split) -> int | None:
        """Number of tasks in the split; None when generated without end."""

    def task(self, split: Split, index: int) -> Task: ...

    def gold(self, task: Task) -> str:
        """Python source of the gold solution: run in the task's sandbox, it prints the right answer."""


class VariedFamily(TaskFamily, Protocol):
    """A family that makes other tasks like a given one of its own: the practice for a failure."""

    def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
        """Training tasks that ask for the same skill: how each stands to `task` (alike, harder, easier, or a word of its own), and it.

        A pure function of the task's content and the seed, with or without an end. `gold` solves them as it does any other task.
        """


class Verifier(Protocol):
    """Judges a finished episode. Runs on the host, gets the truth in `task.data`, and never the sandbox of the agent."""

    async def __call__(self, task: Task, episode: Episode) -> Score: ...


class PreparedVerifier(Verifier, Protocol):
    """A verifier that may refuse to be used, keeps something in the run folder, or takes longer than others."""

    @property
    def timeout_s(self) -> float:
        """Seconds that one score may take."""

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Called once before the first episode; `UserError` keeps the run from starting.

        Args:
            root: the project.
            folder: the run folder, which may not exist yet; None: there is no run.
        """


class SandboxVerifier(Protocol):
    """A verifier that judges in sandboxes of its own, opened after the agent's last action; it never gets the agent's.

    It knows the agent's work from `episode.outputs` alone. What the work does wrong is a score; a fault of the sandbox layer
    is raised (`InfrastructureError`: tried again, then unscored), and so is a task whose tests are broken (`TaskError`: unscored).
    """

    needs_sandboxes: bool  # True; a plain `Verifier` has no such attribute

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score: ...


class Policy(Protocol):
    """Samples completions from token ids: an inference server, or a scripted policy in tests."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Raises `ServingError` when the server fails; never gives an empty completion without a finish reason.

        After `timeout_s` it returns the tokens that were sampled until then, perhaps none, with the finish reason `CUT`. A policy that
        cannot do so ignores `timeout_s`, and is cancelled at the end of the episode's time; the tokens of that request are lost then.

        The tokens are drawn from the distribution that `params` describe, and their logprobs are of it; with `params.supports` the
        completion has the support of every token, or its episode fails. `request_id` is the id of the episode, a hyphen and a number.
        """


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
    record: Any  # how the tools answered so far (`agentrl.agent.provoked.CallRecord`)


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


class ElsewhereRequest(Protocol):
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

    def elsewhere(self, at_most: int, *, within_s: float) -> AbstractContextManager[ElsewhereRequest]:
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

    def apart(self, copy: bytes | None) -> AbstractAsyncContextManager[LiveEpisode]:
        """The same episode for an agent with a sandbox of its own, which begins with a `working_copy` and ends with the block.

        It is of the task's spec, and `sandbox_lost` is of it alone. Meanwhile the episode has no state that could be captured.
        """

    def running(self, sandbox: Sandbox | None) -> AbstractContextManager[None]:
        """Around what the agent's words have called: its time is the agent's, should the episode run out of it; and the sandbox's."""

    def shown(self, output: str) -> str:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """How full the key/value caches of a policy's servers are."""

    reading: int  # counts up: another number is another reading
    shares: tuple[float, ...]  # of each cache's blocks that running requests hold, 0 to 1; prefixes that are only kept count as free


class PolicyServer(Policy, Protocol):
    """A policy whose weights change while it answers: what a run needs of serving.

    Requests wait while what serves is being replaced; callers of `generate` never hear of it.
    """

    @property
    def version(self) -> int:
        """Number of the version that answers now; -1 before the first."""

    @property
    def sha256(self) -> str:
        """Of its weights: a learner that went back to a checkpoint makes the same number again."""

    @property
    def cache_use(self) -> CacheUse | None:
        """The newest reading, some seconds old at most; None while there is none."""

    @property
    def token_s(self) -> float:
        """Seconds per sampled token of one request, measured on the idle server at its start; 0 if unknown."""

    async def start(self, version: PolicyVersion, *, await_probe: bool = False) -> None:
        """Returns once it answers with `version` and the logprob probe agrees. `await_probe`: wait for the learner to write version 0's."""

    def episode(self, episode_id: str, task_key: str) -> AbstractContextManager[object]:
        """Around an episode whose requests come: attempts at one task share their prompt, and may be kept together."""

    def figures(self) -> dict[str, float]:
        """What a step's line of metrics says of several servers; empty for one."""

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Takes a published version in; the old one serves on unless the probe agrees. Raises `SwapError`, `ServingError`."""

    async def fall_back(self, version: PolicyVersion) -> None:
        """Serves `version`, published earlier, in place of one that the learner has retracted."""

    async def wait_version(self, number: int) -> None:
        """Returns once version `number` or a newer one answers."""

    async def watch(self, *, on_loss: Callable[[], Awaitable[None]]) -> None:
        """Replaces what dies; ends by cancellation or `ServingError`. `on_loss` is called when the learner may be stuck with it."""

    async def close(self) -> None: ...


class WeightChannel(Protocol):
    """Takes published versions into the running server.

    A factory gets the server (`agentrl.serving.VLLMServer`) and, as `registry_folder`, the folder that versions are in: a new
    channel for each server that is started, one of several replicas too. The server begins with the file channel's end, unless the
    recipe says nccl.
    """

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, *, max_abs_diff: float, timeout_s: float) -> SwapReport:
        """Returns once the server answers with `version` and the probe agrees, else raises `SwapError`."""

    async def close(self) -> None:
        """Lets go of what the channel holds; the server is stopped by its owner."""


class ExperienceStore(Protocol):
    """Durable scored groups between rollout and learner processes. Safe to use from several processes at once.

    The driver and every rank of the learner open it with its factory, which gets the run folder and the recipe, and they meet in it
    alone. Every method raises `StoreError` when the store is damaged, full or unavailable.
    """

    def put(self, group: Group) -> bool:
        """Stores a group durably; False when a group of this index is already there (delivered twice)."""

    def has(self, index: int) -> bool: ...

    def take(self, step: int, indices: Sequence[int], *, timeout_s: float) -> tuple[Group, ...]:
        """Waits until all the groups exist and returns them in order; raises `TimeoutError`. Taking is not consuming."""

    def commit(self, step: int, indices: Sequence[int], checkpoint: str) -> None:
        """Marks the groups consumed by `step`, whose effect is durable in `checkpoint`. Raises `StoreError` if one was consumed before."""

    def reconcile(self, consumed: Mapping[int, Sequence[int]]) -> None:
        """After a crash: makes the store agree with the checkpoint in use (step -> group indices consumed by it)."""

    def indices(self) -> tuple[int, ...]:
        """Of all groups that are stored, in ascending order."""

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]:
        """The groups in the order asked for, equal to those that were put; `StoreError` when one is absent or damaged."""

    def close(self) -> None: ...


class EpisodeKeeper(Protocol):
    """Keeps what running groups have so far, so that a crash costs an episode no more than the turn it was in.

    It is a safety net: what cannot be kept or found is logged, and never fails the episode.
    """

    async def keep(self, group: int, member: int, state: EpisodeState) -> None:
        """Keeps the newest state of one member of a group, in place of the one before."""

    async def finish(self, group: int, member: int, scored: ScoredEpisode) -> None:
        """Keeps a member's outcome in place of its state, until its group is stored."""

    async def find(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        """What is kept of a member; None when there is nothing, or nothing intact."""


class VersionRegistry(Protocol):
    """The policy versions of a run, shared between processes through the run folder."""

    def add(self, version: PolicyVersion) -> None: ...

    def get(self, number: int) -> PolicyVersion | None: ...

    def latest(self, *states: VersionState) -> PolicyVersion | None:
        """Highest-numbered version in one of `states` (any state when none is given)."""

    def set_state(self, number: int, state: VersionState, *, sha256: str | None = None) -> None:
        """Raises `StoreError` where the version's weights are not those of `sha256`."""

    def set_evals(self, number: int, evals: Mapping[str, float]) -> None: ...

    def verify(self, version: PolicyVersion) -> None:
        """Raises `StoreError` unless the weights that are kept are those that were registered."""

    def reconcile(self, newest: int) -> tuple[int, ...]:
        """After a crash: forgets every version newer than the learner's checkpoint, weights included; returns their numbers."""

    def hold(self, number: int) -> None:
        """Has `prune`, in any process, keep the weights of this version, until another one is held."""

    def prune(self, keep: int) -> tuple[int, ...]:
        """Deletes the weights of old versions, all but those still needed and the `keep` newest; returns their numbers."""

    def close(self) -> None: ...

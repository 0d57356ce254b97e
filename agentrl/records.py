"""The nouns of agentrl: frozen records that pass between the stages. Standard library only.

A stage that needs only a record gets the record, never the object that made it. Equal lengths and ranges are checked on
construction, so a record that exists is a record that is consistent. `agentrl.codec` turns records into JSON and back.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from agentrl import destinations
from agentrl.fields import JsonObject, Record, Text
from agentrl.limits import Limits as Limits
from agentrl.limits import defining
from agentrl.memo import Memo
from agentrl.sampling import SamplingParams as SamplingParams
from agentrl.sampling import Supports, check_forced

MAX_SNAPSHOT_BYTES = 64 << 20
"""Largest working directory that is part of an `EpisodeState`."""

MAX_AGENT_STATE_CHARS = 1 << 20
"""Most characters of JSON in `EpisodeState.agent_state`."""

OUTPUT_FILES = 256
"""Most files that an episode's outputs may have."""

OUTPUT_BYTES = 4 << 20
"""Most bytes that an episode's outputs may have together."""

CUT = "time"  # `finish_reason` of a completion that was cut off at a time limit, with the tokens sampled until then
REMOVED_FILES = 4096
"""Most files whose removal is a part of an episode's outputs."""

WHOLE_MODEL = "model.safetensors"  # the file that holds a version's weights ...
ADAPTER = "adapter_model.safetensors"  # ... or only what a low-rank adapter adds to those of version 0


class Split(StrEnum):
    """Which part of a task family a task belongs to."""

    TRAIN = "train"
    HELDOUT = "heldout"
    HELDOUT_REAL = "heldout_real"


class Blame(StrEnum):
    """Who caused a failure. Only `POLICY` failures are scored."""

    POLICY = "policy"
    TASK = "task"
    INFRASTRUCTURE = "infrastructure"


class VersionState(StrEnum):
    """Life of a policy version: candidate -> serving -> served, once another serves; promoted or rolled back, once judged."""

    CANDIDATE = "candidate"
    SERVING = "serving"
    SERVED = "served"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall(Record):
    """A tool call as the policy wrote it: `ToolCall(name="python", arguments={"code": "print(1)"})`."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Record):
    """One chat message: `Message(role="user", content="How many rows?")`."""

    role: str
    content: Text
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec(Record):
    """What a sandbox is made of and what it may use: `SandboxSpec(image="sandboxes/tables")`.

    `image` is a folder that holds an `image.toml` recipe or a `Dockerfile` (see `agentrl.sandbox.images`), relative to the
    project root. `network` is what programs may reach, through a proxy (see `agentrl.sandbox.egress`): nothing by default.
    """

    image: str
    memory_mb: int = 256
    processes: int = 32
    cpus: float = 1.0
    disk_mb: int = 64  # of the working directory, and of /tmp; both are memory, and never get all of it
    open_files: int = 256
    runtime: str = ""  # container runtime name, such as "runsc"; empty: the backend's own
    network: tuple[str, ...] = ()  # allow-list: "pypi.org:443", "*.example.org:443", "10.1.2.3:8080" (see `agentrl.destinations`)

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        for name in ("memory_mb", "processes", "cpus", "disk_mb", "open_files"):
            if getattr(self, name) <= 0:
                raise ValueError(f"SandboxSpec.{name} must be positive, got {getattr(self, name)}")
        try:
            destinations.parse_all(self.network)
        except ValueError as error:
            raise ValueError(f"SandboxSpec.network: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Record):
    """One problem to solve: what the agent is told, what its sandbox holds, and (host only) the truth.

    >>> Task(id="demo-1", family="demo", prompt=(Message(role="user", content="Say 4."),), tools=("submit",),
    ...      sandbox=SandboxSpec(image="sandboxes/tables"), verifiers=("rewards.tables:exact_answer",),
    ...      data={"answer": "4"}, split=Split.TRAIN).key[:4]
    '0901'
    """

    id: str
    family: str
    prompt: tuple[Message, ...]
    tools: tuple[str, ...]  # tool names, such as ("python", "submit")
    sandbox: SandboxSpec
    verifiers: tuple[str, ...]  # plugin references, such as "rewards.tables:exact_answer"
    data: JsonObject  # truth and metadata; never enters the sandbox
    split: Split
    files: Mapping[str, str] = field(default_factory=dict)  # relative path -> text, written to the working directory
    binary_files: Mapping[str, str] = field(default_factory=dict)  # the same, of files that are not text: path -> base64
    outputs: tuple[str, ...] = ()  # patterns of the files that are judged (`agentrl.contract.outputs`): ("report.json", "src/**")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not self.prompt:
            raise ValueError(f"task {self.id!r}: prompt is empty")
        for path in (*self.files, *self.binary_files, *self.outputs):
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"task {self.id!r}: file path {path!r} leaves the working directory")
        for path, text in self.binary_files.items():
            try:
                base64.b64decode(text, validate=True)
            except ValueError as error:
                raise ValueError(f"task {self.id!r}: binary file {path!r} is not base64: {error}") from None

    @property
    def kind(self) -> str:
        """The kind of question that this is, as evaluations count it: what the family says in `data["kind"]`, else its name."""
        return str(self.data.get("kind", self.family))

    @property
    def key(self) -> str:
        """Content hash (sha256, hex) of everything that defines the task."""
        text = json.dumps(self, default=defining, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def contents(self) -> dict[str, bytes]:
        """What the working directory of a new sandbox holds: relative path -> bytes."""
        texts = {path: text.encode() for path, text in self.files.items()}
        return texts | {path: base64.b64decode(text, validate=True) for path, text in self.binary_files.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan(Record):
    """Completion tokens `[start, end)` were sampled by the weights of policy version `version`."""

    version: int
    start: int
    end: int

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not 0 <= self.start < self.end:
            raise ValueError(f"VersionSpan needs 0 <= start < end, got [{self.start}, {self.end})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult(Record):
    """What the agent was shown for one tool call. `ok` is the program's own success, not the sandbox's."""

    name: str
    output: Text
    ok: bool
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Record):
    """One act -> observe step of one agent, in exact tokens.

    `prompt_ids` are only the tokens that are new since the previous turn's completion; the whole context is the
    concatenation over turns of prompt_ids + completion_ids. Nothing is ever tokenized twice.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T] of the behaviour policy, natural log: of the distribution that was sampled from
    versions: tuple[VersionSpan, ...]  # cover [0, T) without gap or overlap
    message: Message  # parsed form of the completion
    finish_reason: str  # "stop", "length" or `CUT`
    tool_results: tuple[ToolResult, ...] = ()
    generate_s: float = 0.0
    tool_s: float = 0.0
    supports: Supports | None = None  # [T] of the completion's tokens; None: all were drawn from the whole vocabulary
    forced: tuple[int, ...] = ()  # places of completion tokens that were put there, not sampled: they are context, and never trained

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        check_forced("Turn", self.forced, len(self.completion_ids))
        if self.supports is not None:
            self.supports.check("Turn", self.completion_ids)
        n = len(self.completion_ids)
        if len(self.logprobs) != n:
            raise ValueError(f"Turn: {n} completion ids but {len(self.logprobs)} logprobs")
        edge = 0
        for span in self.versions:
            if span.start != edge:
                raise ValueError(f"Turn: version spans leave a gap or overlap at token {edge}")
            edge = span.end
        if edge != n:
            raise ValueError(f"Turn: version spans cover {edge} of {n} completion tokens")

    @property
    def sampled(self) -> int:
        """How many tokens of the completion the policy sampled."""
        return len(self.completion_ids) - len(self.forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent(Record):
    """The turn that a trajectory comes from, in another trajectory of its episode."""

    trajectory: int  # index in Episode.trajectories, smaller than its child's
    turn: int  # index of the turn
    call: int | None = None  # index of the tool call that started a sub-agent; None: the same agent goes on with a context of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Record):
    """One line of turns by one agent, in one context. Its place in `Episode.trajectories` is its id."""

    agent: str
    turns: tuple[Turn, ...]
    parent: Parent | None = None  # None: it began with the episode
    prompt: tuple[Message, ...] = ()  # what its agent was told at the start; empty: the task's prompt
    stop_reason: str = (
        "submitted"  # submitted | answered | turn_limit | token_limit | wall_limit | tool_timeout | failed | compacted, summarized,
        # rejected or restarted, around a restart of the context; empty: it goes on
    )
    inherited: tuple[str, ...] = ()  # ids of the episodes that sampled its first turns; the turns after them are its own

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if len(self.inherited) > len(self.turns):
            raise ValueError(f"Trajectory: {len(self.inherited)} turns inherited of {len(self.turns)}")

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns that were sampled here, not in the episode that this one branched from."""
        return self.turns[len(self.inherited) :]


def check_tree(trajectories: tuple[Trajectory, ...]) -> None:
    """Raises `ValueError` unless every parent is a turn, and a call of it, of an earlier trajectory."""
    for index, child in enumerate(trajectories):
        parent = child.parent
        if parent is None:
            continue
        if not 0 <= parent.trajectory < index or not 0 <= parent.turn < len(trajectories[parent.trajectory].turns):
            raise ValueError(f"trajectory {index}: its parent, turn {parent.turn} of trajectory {parent.trajectory}, is not there")
        calls = trajectories[parent.trajectory].turns[parent.turn].message.tool_calls
        if parent.call is not None and not 0 <= parent.call < len(calls):
            raise ValueError(f"trajectory {index}: it comes from call {parent.call} of a turn with {len(calls)} calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Record):
    """Something that went wrong, with the blame decided once, at the boundary where it was seen."""

    stage: str  # sandbox | generate | tool | verify | ...
    blame: Blame
    kind: str  # short machine-readable name, such as "exec_timeout"
    message: Text
    turn: int | None = None  # how many turns the episode had by then
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode(Record):
    """The tree of trajectories of one attempt at one task."""

    __pydantic_config__: ClassVar[Any] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}  # for agentrl.codec

    id: str
    task_id: str
    task_key: str
    trajectories: tuple[Trajectory, ...]
    answer: Text | None = None  # what the agent submitted; None: nothing
    failures: tuple[Failure, ...] = ()
    attempt: int = 0  # infrastructure retries before this one
    wall_s: float = 0.0
    sandbox_s: float = 0.0  # opening, executing and closing the sandbox
    outputs: Mapping[str, bytes] = field(default_factory=dict)  # relative path -> bytes, as the agent left them; hostile input
    removed: tuple[str, ...] = ()  # files of the image's working directory that the agent removed, where all of it is judged; hostile input
    memory: Memo | None = None  # None: its run has no memory

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        check_tree(self.trajectories)
        if len(self.removed) > REMOVED_FILES:
            raise ValueError(f"episode {self.id}: more than {REMOVED_FILES} removed files")
        if len(self.outputs) > OUTPUT_FILES or sum(map(len, self.outputs.values())) > OUTPUT_BYTES:
            raise ValueError(f"episode {self.id}: outputs of more than {OUTPUT_FILES} files or {OUTPUT_BYTES} bytes")

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version that sampled any token, or None when no token was sampled."""
        return min((s.version for t in self.trajectories for u in t.turns for s in u.versions), default=None)

    @property
    def stop_reason(self) -> str:
        """Why its first agent ended, in the last of the contexts that it had."""
        own, reason = {0}, ""  # its trajectories and those of its summaries
        for index, one in enumerate(self.trajectories):
            if one.parent is not None and one.parent.call is None and one.parent.trajectory in own:
                own.add(index)
            if index in own and one.agent == self.trajectories[0].agent:
                reason = one.stop_reason
        return reason

    @property
    def left_out(self) -> bool:
        """True when a task or infrastructure failure keeps this episode out of the loss and of its group's baseline."""
        return any(f.blame is not Blame.POLICY for f in self.failures)

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled for this episode; those it inherited are another's."""
        return sum(u.sampled for t in self.trajectories for u in t.own_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeState(Record):
    """An episode at the boundary of two turns: what is needed to go on from there, once or many times.

    The files of the working directory, the log of the turns with their tool results, and what the agent and its tools keep on the
    host. Not part of it: /tmp, running programs, and the memory of a Python session.
    """

    __pydantic_config__: ClassVar = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}  # a snapshot is not text

    episode_id: str
    task_key: str
    attempt: int
    trajectories: tuple[Trajectory, ...]  # as far as they are; those that go on have no stop reason
    prompt_ids: tuple[tuple[int, ...], ...]  # [trajectory] tokens between its last completion and the next, such as the tools' answers
    agent_state: JsonObject = field(default_factory=dict)  # what the agent keeps beside the turns, its tools' states among it
    snapshot: bytes | None = None  # of the working directory, as `Sandbox.snapshot` gives it; None: no sandbox was opened yet
    output_chars: int = 0  # shown by tools so far
    wall_s: float = 0.0  # spent so far; the next four too
    sandbox_s: float = 0.0
    program_s: float = 0.0  # what the agent called
    sampled_s: float = 0.0  # requests at the server's usual pace
    lost_s: float = 0.0  # requests, to a slow server
    failures: tuple[Failure, ...] = ()  # of tools, at what the agent asked of them
    memory: Memo | None = None

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not self.turn_count or len(self.prompt_ids) != len(self.trajectories):
            raise ValueError(
                f"EpisodeState: {self.turn_count} turns, prompts of {len(self.prompt_ids)} in {len(self.trajectories)} trajectories"
            )
        check_tree(self.trajectories)
        if (size := len(json.dumps(self.agent_state, ensure_ascii=False))) > MAX_AGENT_STATE_CHARS:
            raise ValueError(f"EpisodeState: an agent's state of {size} characters of JSON; at most {MAX_AGENT_STATE_CHARS} are kept")
        if self.snapshot is not None and len(self.snapshot) > MAX_SNAPSHOT_BYTES:
            raise ValueError(f"EpisodeState: a snapshot of {len(self.snapshot) >> 20} MiB; at most {MAX_SNAPSHOT_BYTES >> 20} MiB are kept")

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version that sampled any token, or None when no token was sampled."""
        return min((s.version for t in self.trajectories for u in t.turns for s in u.versions), default=None)

    @property
    def turn_count(self) -> int:
        """Turns of all trajectories together."""
        return sum(len(t.turns) for t in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Record):
    """A verifier's judgement. `value` None means unscored, with the reason; it is never 0 by default."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    evidence: Text = ""
    reason: Text = ""
    turn_rewards: tuple[tuple[float, ...], ...] = ()  # [trajectory][turn] credit for single turns, beside `value`; empty: none is given
    blame: Blame | None = None  # who is to blame that there is no value, where that is known
    branches: tuple[float | None, ...] = ()  # [trajectory] what each is worth by itself; None: it was not judged; empty: none was
    without: tuple[float | None, ...] = ()  # [trajectory] what `value` would be without it; None: unknown; empty: all are

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.value is None and not self.reason:
            raise ValueError("Score without a value needs a reason")
        if any(reward != reward for rewards in self.turn_rewards for reward in rewards):
            raise ValueError("Score.turn_rewards holds NaN")
        if self.value is not None and self.blame is not None:
            raise ValueError("Score.blame says why there is no value, and there is one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode(Record):
    """An episode and its combined score."""

    episode: Episode
    score: Score

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        turns = tuple(len(trajectory.turns) for trajectory in self.episode.trajectories)
        rewards = tuple(len(some) for some in self.score.turn_rewards)
        if rewards and rewards != turns:
            raise ValueError(f"episode {self.episode.id}: turn rewards for {rewards} turns, but its trajectories have {turns}")
        if {len(self.score.branches), len(self.score.without)} - {0, len(turns)}:
            raise ValueError(f"episode {self.episode.id}: Score.branches or without do not fit its {len(turns)} trajectories")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Record):
    """An attempt that its group went on without. It is no failure and nobody's fault, and nothing of it is trained."""

    episode_id: str
    reason: str  # spare: as many as the group needs had ended; equal: the first ones had all scored the same
    begun: bool = True
    turns: int = 0  # that were finished
    tokens: int = 0  # sampled in them; what the server had sampled of the next one is lost
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Record):
    """All attempts at one task that share a baseline. `index` numbers groups of a run from 0; it fixes task and step."""

    index: int
    task_id: str
    task_key: str
    episodes: tuple[ScoredEpisode, ...]
    cancelled: tuple[Cancelled, ...] = ()

    @property
    def scored(self) -> tuple[ScoredEpisode, ...]:
        """Episodes that count: not left out and with a score."""
        return tuple(e for e in self.episodes if not e.episode.left_out and e.score.value is not None)

    @property
    def fault(self) -> Failure | None:
        """What is wrong with the task itself, when the whole group is left out for it."""
        return next((f for e in self.episodes for f in e.episode.failures if f.blame is Blame.TASK), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Record):
    """One token sequence to train on. All tuples have the length of `token_ids`; position t describes token t.

    A sample has advantages, or the rewards of which a critic makes them: the other of the two is empty.
    """

    episode_id: str
    group_index: int
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[bool, ...]  # [T] True where the policy sampled the token
    logprobs: tuple[float, ...]  # [T] behaviour logprobs, 0.0 where masked
    versions: tuple[int, ...]  # [T] policy version that sampled the token, -1 where masked
    advantages: tuple[float, ...] = ()  # [T] 0.0 where masked
    rewards: tuple[float, ...] = ()  # [T] what the episode earned at that token, 0.0 where masked
    supports: Supports | None = None  # [T] those of masked tokens are the whole vocabulary; None: all are
    rollout_tokens: int | None = None  # trained tokens of all samples of its episode; None: it is the only one

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        n = len(self.token_ids)
        if self.supports is not None:
            self.supports.check("Sample", self.token_ids)
        if self.advantages and self.rewards:
            raise ValueError("Sample: advantages are given, or rewards for a critic, never both")
        for name in ("loss_mask", "logprobs", "versions", "rewards" if self.rewards else "advantages"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"Sample.{name} has {len(getattr(self, name))} entries for {n} tokens")
        if n and self.loss_mask[0]:
            raise ValueError("Sample: token 0 has no context, so it cannot be trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Record):
    """What one optimizer step consumes, over all ranks. `denominator` is the global count of trained tokens."""

    step: int
    samples: tuple[Sample, ...]
    denominator: int
    group_indices: tuple[int, ...]  # every group this step consumes, those without a sample included


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion(Record):
    """One set of weights. Version 0 is the base policy; version n is the result of update n."""

    number: int
    parent: int | None
    folder: str  # relative to the run folder; a Hugging Face folder, or the files of an adapter to version 0
    sha256: str  # of the file `weights`
    state: VersionState = VersionState.CANDIDATE
    evals: Mapping[str, float] = field(default_factory=dict)
    weights: str = WHOLE_MODEL  # or ADAPTER: the version is version 0 with this adapter

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if self.weights not in (WHOLE_MODEL, ADAPTER):
            raise ValueError(f"PolicyVersion: weights are in {WHOLE_MODEL} or {ADAPTER}, not in {self.weights!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult(Record):
    """How a program in a sandbox ended. Output is bytes turned to text with replacement; it is hostile input.

    `exit_code` is None when the program was killed for `reason` ("timeout", "memory", "killed"). Of a call in a session it is 0,
    or 1 after an exception; any other means that the session has ended, as `session_ended` says.
    """

    exit_code: int | None
    stdout: Text
    stderr: Text
    wall_s: float
    truncated: bool = False
    reason: str = ""
    restarted: bool = False  # the session is new: it had ended before this call, or the sandbox is from a snapshot, which holds files only
    session_ended: bool = False  # the session did not outlive this call: the next one starts afresh

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Record):
    """What the inference server answered: exact ids, their logprobs, and which weights sampled them."""

    token_ids: tuple[int, ...]  # the stop token is included when one ended the completion
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str  # "stop", "length", or `CUT` if the request's time was up
    supports: Supports | None = None  # one a token, where they were asked for
    forced: tuple[int, ...] = ()  # places of tokens that were not sampled, as in a `Turn`

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        check_forced("Completion", self.forced, len(self.token_ids))
        if self.supports is not None:
            self.supports.check("Completion", self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Record):
    """Token sequences and the learner's own logprobs for them; a server that took the weights must agree."""

    token_ids: tuple[tuple[int, ...], ...]  # [P][T]
    logprobs: tuple[tuple[float, ...], ...]  # [P][T-1], logprob of token t+1 given tokens <= t, temperature 1
    next_ids: tuple[tuple[int, ...], ...] = ()  # [P][M] the likeliest tokens after each row; empty: they are not compared
    next_logprobs: tuple[tuple[float, ...], ...] = ()  # [P][M] of these, before any truncation
    temperature: float | None = None  # that `next_logprobs` were taken at; None: the recipe's for rollouts

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError("Probe: as many logprob rows as token rows are needed")
        for ids, logprobs in zip(self.token_ids, self.logprobs, strict=True):
            if len(logprobs) != len(ids) - 1:
                raise ValueError(f"Probe: {len(ids)} tokens need {len(ids) - 1} logprobs, got {len(logprobs)}")
        if self.next_ids and len(self.next_ids) != len(self.token_ids):
            raise ValueError("Probe: next tokens are given after every row, or after none")
        if [len(ids) for ids in self.next_ids] != [len(logprobs) for logprobs in self.next_logprobs]:
            raise ValueError("Probe: every next token needs its logprob")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport(Record):
    """What one weight swap cost and how well server and learner agree."""

    version: int
    stall_ms: float  # time during which no request could make progress
    total_ms: float
    probe_max_abs_diff: float  # nats

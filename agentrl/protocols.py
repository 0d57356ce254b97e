"""The verbs of agentrl, as structural types. Implementations live in the rooms; nothing here imports one.

Every wait takes a deadline in seconds and ends with a typed error (`agentrl.errors`) when it passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentrl.records import (
    Completion,
    Episode,
    EpisodeState,
    ExecResult,
    Group,
    PolicyVersion,
    Probe,
    SamplingParams,
    SandboxSpec,
    Score,
    ScoredEpisode,
    Split,
    SwapReport,
    Task,
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
        ...

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """Like `exec(["python3", "-I", "-c", code])`, from a warm interpreter: each call starts afresh, without the start-up time.

        With `session`, `code` runs in the interpreter of that name instead, which lives on: later calls find the names of
        earlier ones, and the value of an expression at the end of `code` is printed (its `repr`, unless it is None). Output is
        each call's own. `sys.exit`, a timeout of any program, or a kill for memory ends a session, and `ExecResult` says so;
        the next call starts a fresh one. A sandbox has at most four sessions: `ValueError` for a fifth name, or a wrong one.
        A snapshot does not hold them.
        """
        ...

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Bytes of a regular file; never follows a link. `FileNotFoundError`, or `ValueError` when too large."""
        ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def snapshot(self) -> bytes:
        """The working directory as a bounded archive that `SandboxBackend.open(..., snapshot=...)` takes.

        Whatever its files and their modes are; `ValueError` when it is too large, and for no other reason.
        """
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Destroys the sandbox and everything in it. Idempotent; never raises for a sandbox that is already gone."""
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """Opens sandboxes of one kind (docker, bubblewrap)."""

    name: str

    async def prepare(self, spec: SandboxSpec) -> None:
        """Builds or finds the image (may take minutes the first time); later `open` calls are fast."""
        ...

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> Sandbox: ...

    async def close(self) -> None:
        """Closes every sandbox this backend still has open, and the backend."""
        ...


class TaskFamily(Protocol):
    """A source of tasks. `task(split, index)` is a pure function of the family's seed, split and index."""

    name: str

    def size(self, split: Split) -> int | None:
        """Number of tasks in the split; None when generated without end."""
        ...

    def task(self, split: Split, index: int) -> Task: ...

    def gold(self, task: Task) -> str:
        """Python source of the gold solution: run in the task's sandbox, it prints the right answer."""
        ...


class Verifier(Protocol):
    """Judges a finished episode. Runs on the host, gets the truth in `task.data`, and never the sandbox of the agent."""

    async def __call__(self, task: Task, episode: Episode) -> Score: ...


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
        """Raises `ServingError` when the server fails; never gives an empty completion without a finish reason."""
        ...


class WeightChannel(Protocol):
    """Takes a published version into the running server(s)."""

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, *, max_abs_diff: float, timeout_s: float) -> SwapReport:
        """Returns once every replica answers with `version` and the probe agrees, else raises `SwapError`."""
        ...


class ExperienceStore(Protocol):
    """Durable scored groups between rollout and learner processes. Safe to use from several processes at once."""

    def put(self, group: Group) -> bool:
        """Stores a group durably; False when a group of this index is already there (delivered twice)."""
        ...

    def has(self, index: int) -> bool: ...

    def take(self, step: int, indices: Sequence[int], *, timeout_s: float) -> tuple[Group, ...]:
        """Waits until all the groups exist and returns them in order; raises `TimeoutError`. Taking is not consuming."""
        ...

    def commit(self, step: int, indices: Sequence[int], checkpoint: str) -> None:
        """Marks the groups consumed by `step`, whose effect is durable in `checkpoint`. Raises `StoreError` if one was consumed before."""
        ...

    def reconcile(self, consumed: Mapping[int, Sequence[int]]) -> None:
        """After a crash: makes the store agree with the checkpoint in use (step -> group indices consumed by it)."""
        ...

    def consumed(self) -> dict[int, int]:
        """Group index -> step that consumed it."""
        ...

    def indices(self) -> tuple[int, ...]: ...

    def groups(self, indices: Iterable[int]) -> tuple[Group, ...]: ...

    def close(self) -> None: ...


class EpisodeKeeper(Protocol):
    """Keeps what running groups have so far, so that a crash costs an episode no more than the turn it was in.

    It is a safety net: what cannot be kept or found is logged, and never fails the episode.
    """

    async def keep(self, group: int, member: int, state: EpisodeState) -> None:
        """Keeps the newest state of one member of a group, in place of the one before."""
        ...

    async def finish(self, group: int, member: int, scored: ScoredEpisode) -> None:
        """Keeps a member's outcome in place of its state, until its group is stored."""
        ...

    async def find(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        """What is kept of a member; None when there is nothing, or nothing intact."""
        ...


class VersionRegistry(Protocol):
    """The policy versions of a run, shared between processes through the run folder."""

    def add(self, version: PolicyVersion) -> None: ...

    def get(self, number: int) -> PolicyVersion | None: ...

    def latest(self, *states: VersionState) -> PolicyVersion | None:
        """Highest-numbered version in one of `states` (any state when none is given)."""
        ...

    def set_state(self, number: int, state: VersionState) -> None: ...

    def set_evals(self, number: int, evals: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker(Protocol):
    """Where metrics go: terminal, TensorBoard, metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def alert(self, text: str) -> None:
        """Says what must not be missed, such as an update that was set aside."""
        ...

    def stage(self, name: str, detail: str = "") -> None:
        """Says which stage the run is in."""
        ...

    def close(self) -> None: ...


JSON = Any

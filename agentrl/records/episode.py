"""An attempt at a task: its tree of trajectories, and its state between two turns.

`Memo` records the notes that an episode wrote to the run's memory, and the notes that it read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl.records.failure import Blame, Failure
from agentrl.records.fields import JsonObject, Record, Text
from agentrl.records.sandbox import MAX_SNAPSHOT_BYTES
from agentrl.records.trajectory import Trajectory, check_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo(Record):
    """The notes that an episode wrote for later episodes, and the sources of the notes that it read. All agents of the episode share the
    notes."""

    scope: str  # the set of notes that the episode reads and adds to, such as "family:pages"
    notes: tuple[Text, ...] = ()
    read: tuple[str, ...] = ()  # ids of the episodes whose notes were read, in order, without duplicates


NO_NOTES = "no notes"
"""Text that an agent sees if the memory is empty."""


MAX_AGENT_STATE_CHARS = 1 << 20
"""Maximum length of the JSON of `EpisodeState.agent_state`, in characters."""


OUTPUT_FILES = 256
"""Maximum number of output files of an episode."""


OUTPUT_BYTES = 4 << 20
"""Maximum total size of the output files of an episode, in bytes."""


REMOVED_FILES = 4096
"""Maximum number of removed files that an episode records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode(Record):
    """The tree of trajectories of one attempt at one task."""

    __pydantic_config__: ClassVar[Any] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}  # for agentrl.records.codec

    id: str
    task_id: str
    task_key: str
    trajectories: tuple[Trajectory, ...]
    answer: Text | None = None  # the answer that the agent submitted
    failures: tuple[Failure, ...] = ()
    attempt: int = 0  # number of infrastructure retries before this attempt
    wall_s: float = 0.0
    sandbox_s: float = 0.0  # seconds spent on opening, using and closing the sandbox
    outputs: Mapping[str, bytes] = field(default_factory=dict)  # relative path -> bytes; untrusted input
    removed: tuple[str, ...] = ()  # image files that the agent removed, if the whole directory is graded; untrusted input
    memory: Memo | None = None  # None if the run has no memory

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        check_tree(self.trajectories)
        if len(self.removed) > REMOVED_FILES:
            raise ValueError(f"episode {self.id}: more than {REMOVED_FILES} removed files")
        if len(self.outputs) > OUTPUT_FILES or sum(map(len, self.outputs.values())) > OUTPUT_BYTES:
            raise ValueError(f"episode {self.id}: outputs of more than {OUTPUT_FILES} files or {OUTPUT_BYTES} bytes")

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of the episode; None if no token was sampled."""
        return min((s.version for t in self.trajectories for u in t.turns for s in u.versions), default=None)

    @property
    def stop_reason(self) -> str:
        """The stop reason of the main agent in its last context."""
        own, reason = {0}, ""  # trajectories of the main agent and of its summaries
        for index, one in enumerate(self.trajectories):
            if one.parent is not None and one.parent.call is None and one.parent.trajectory in own:
                own.add(index)
            if index in own and one.agent == self.trajectories[0].agent:
                reason = one.stop_reason
        return reason

    @property
    def left_out(self) -> bool:
        """Whether a task or infrastructure failure excludes the episode from the loss and from its group's baseline."""
        return any(f.blame is not Blame.POLICY for f in self.failures)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens sampled for this episode, excluding inherited turns."""
        return sum(u.sampled for t in self.trajectories for u in t.own_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeState(Record):
    """An episode between two turns. From this state, an episode can be resumed, and branched any number of times.

    The state contains the files of the working directory, the turns with their tool results, and the state that the agent and its tools
    have on the host. The state does not contain /tmp, running programs, or the memory of a Python session.
    """

    __pydantic_config__: ClassVar = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}  # a snapshot is not text

    episode_id: str
    task_key: str
    attempt: int
    trajectories: tuple[Trajectory, ...]  # trajectories that are not finished have no stop reason
    prompt_ids: tuple[tuple[int, ...], ...]  # [trajectory] tokens after the trajectory's last completion, such as tool results
    agent_state: JsonObject = field(default_factory=dict)  # state of the agent and its tools
    snapshot: bytes | None = None  # from `Sandbox.snapshot`; None if no sandbox was opened
    output_chars: int = 0  # characters of tool output so far
    wall_s: float = 0.0  # seconds so far, as in the next four fields
    sandbox_s: float = 0.0
    program_s: float = 0.0  # spent in programs that the agent called
    sampled_s: float = 0.0  # spent in requests, at the server's usual pace
    lost_s: float = 0.0  # lost in requests because the server was slow
    failures: tuple[Failure, ...] = ()  # tool failures that the policy caused
    memory: Memo | None = None

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not self.turn_count or len(self.prompt_ids) != len(self.trajectories):
            raise ValueError(
                f"EpisodeState: {self.turn_count} turns, and prompts for {len(self.prompt_ids)} of {len(self.trajectories)} trajectories"
            )
        check_tree(self.trajectories)
        if (size := len(json.dumps(self.agent_state, ensure_ascii=False))) > MAX_AGENT_STATE_CHARS:
            raise ValueError(f"EpisodeState: agent_state has {size} characters of JSON; at most {MAX_AGENT_STATE_CHARS} are allowed")
        if self.snapshot is not None and len(self.snapshot) > MAX_SNAPSHOT_BYTES:
            raise ValueError(
                f"EpisodeState: the snapshot has {len(self.snapshot) >> 20} MiB; at most {MAX_SNAPSHOT_BYTES >> 20} MiB are allowed"
            )

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token in this state; None if no token was sampled."""
        return min((s.version for t in self.trajectories for u in t.turns for s in u.versions), default=None)

    @property
    def turn_count(self) -> int:
        """Number of turns in all trajectories."""
        return sum(len(t.turns) for t in self.trajectories)

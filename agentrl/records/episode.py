"""One attempt at a task: its tree of trajectories, and its state between two turns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl.records.failure import Blame, Failure
from agentrl.records.fields import JsonObject, Record, Text
from agentrl.records.memo import Memo
from agentrl.records.sandbox import MAX_SNAPSHOT_BYTES
from agentrl.records.trajectory import Trajectory, check_tree

MAX_AGENT_STATE_CHARS = 1 << 20
"""Most characters of JSON in `EpisodeState.agent_state`."""


OUTPUT_FILES = 256
"""Most files that an episode's outputs may have."""


OUTPUT_BYTES = 4 << 20
"""Most bytes that an episode's outputs may have together."""


REMOVED_FILES = 4096
"""Most files whose removal is a part of an episode's outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode(Record):
    """The tree of trajectories of one attempt at one task."""

    __pydantic_config__: ClassVar[Any] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}  # for agentrl.records.codec

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

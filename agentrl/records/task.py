"""A task: its prompt, tools, sandbox, limits and ground truth."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.records.chat import Message
from agentrl.records.environment import PASS_THRESHOLD, RETURN, EnvironmentSpec
from agentrl.records.fields import JsonObject, Record
from agentrl.records.limits import Limits as Limits
from agentrl.records.limits import key_fields
from agentrl.records.sandbox import SandboxSpec


class Split(StrEnum):
    """The split of a task family to which a task belongs."""

    TRAIN = "train"
    HELDOUT = "heldout"
    HELDOUT_REAL = "heldout_real"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Record):
    """A problem: the prompt, the contents of the sandbox, and the ground truth, which stays on the host.

    >>> Task(id="demo-1", family="demo", prompt=(Message(role="user", content="Say 4."),), tools=("submit",),
    ...      sandbox=SandboxSpec(image="sandboxes/tables"), verifiers=("rewards.tables:exact_answer",),
    ...      data={"answer": "4"}, split=Split.TRAIN).key[:4]
    '0901'
    """

    id: str
    family: str
    prompt: tuple[Message, ...]
    tools: tuple[str, ...]  # tool names, such as ("python", "submit")
    sandbox: SandboxSpec | None = None  # None means that the task has no sandbox
    verifiers: tuple[str, ...]  # plug-in references, such as "rewards.tables:exact_answer"
    data: JsonObject  # truth and metadata; never copied into a sandbox
    split: Split
    files: Mapping[str, str] = field(default_factory=dict)  # relative path -> text, written to the working directory
    binary_files: Mapping[str, str] = field(default_factory=dict)  # relative path -> base64, for files that are not text
    outputs: tuple[str, ...] = ()  # patterns for the files that are graded (`agentrl.task.outputs`), such as ("report.json", "src/**")
    limits: Limits = field(default_factory=Limits)
    environment: EnvironmentSpec | None = None  # the environment in which the agent acts; its first observation follows the prompt

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not self.prompt and self.environment is None:
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
        """The kind of task by which evaluations group results: `data["kind"]` if the family sets it, else the name of the family."""
        return str(self.data.get("kind", self.family))

    @property
    def question(self) -> str:
        """The last message of the prompt. If the task has no prompt, the reference to the environment and the seed."""
        if self.prompt or self.environment is None:
            return self.prompt[-1].content
        return f"{self.environment.ref}, seed {self.environment.seed}"

    @property
    def key(self) -> str:
        """The sha256 (hex) of everything that defines the task."""
        text = json.dumps(self, default=key_fields, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def pass_threshold(self) -> float | None:
        """The minimum score of a passing attempt; None means no threshold. If the score is the sum of rewards, this is the threshold of the
        environment."""
        return self.environment.pass_threshold if self.environment is not None and self.verifiers == (RETURN,) else PASS_THRESHOLD

    def contents(self) -> dict[str, bytes]:
        """Returns the files in a new sandbox's working directory: relative path -> bytes."""
        texts = {path: text.encode() for path, text in self.files.items()}
        return texts | {path: base64.b64decode(text, validate=True) for path, text in self.binary_files.items()}

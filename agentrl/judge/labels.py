"""Labelled answers as JSON lines. The lines are self-contained, so a label file remains usable without its run.

    {"id": "1f0c...", "label": "right", "by": "anna", "question": "...", "answer": "...", "reference": "...", "messages": [...]}

Only `question`, `answer` and `label` are required. If a labeller labels an answer more than once, only the last line counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base.error_text import reason_text
from agentrl.base.untrusted_files import read_bytes
from agentrl.base.user_code import printable
from agentrl.errors import UserError
from agentrl.judge.rendering import PromptField
from agentrl.judge.reward_model import reward_model_text
from agentrl.records import Episode, Message, SandboxSpec, Split, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.records.fields import json_object, text

RIGHT, WRONG, SKIP, WITHDRAWN = "right", "wrong", "skip", "withdrawn"

_LONGEST_LINE = 8 << 20  # bytes
_MOST_LINES = 200_000
_MOST_BYTES = 4 << 30
_MOST_MESSAGES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPreference:
    """The input texts of a reward model for a correct and a wrong answer to the same question."""

    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerItem:
    """An answer to a question, with the reference answer, the conversation and the task data."""

    id: str
    task_id: str
    question: str
    answer: str
    reference: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation, in the format of a run's `episodes/`
    data: Mapping[str, Any] = field(default_factory=dict)  # additional task data for verifiers that need it

    @property
    def key(self) -> tuple[str, str, str]:
        """The id and the text of the answer, because different answers in two files may have the same id."""
        return self.id, self.question, self.answer

    def task(self, *, reference_keys: Iterable[str] = ("answer",)) -> Task:
        """Returns a task for a verifier, with the question and the reference answer but without tools or a sandbox."""
        truth = {} if self.reference is None else dict.fromkeys(reference_keys, self.reference)
        return Task(
            id=self.task_id,
            family="labels",
            prompt=(Message(role="user", content=self.question),),
            tools=(),
            sandbox=SandboxSpec(image="none"),
            verifiers=(),
            data={**truth, **self.data},
            split=Split.HELDOUT,
        )

    def episode(self) -> Episode:
        """Returns an episode in which the agent submitted `answer`. It contains the conversation in `messages`, but no tokens."""
        task = self.task()
        turns = tuple(_turns(self.messages))
        trajectories = (Trajectory(agent="main", turns=turns),) if turns else ()
        return Episode(id=self.id, task_id=task.id, task_key=task.key, trajectories=trajectories, answer=self.answer)

    def to_line(self) -> dict[str, Any]:
        """Returns the fields of a line in a label file that describe this answer."""
        fields = {name: getattr(self, name) for name in ("id", "task_id", "question", "answer", "reference")}
        return {**fields, "messages": list(self.messages), **({"data": dict(self.data)} if self.data else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswer:
    """An answer and the labels that labellers gave it."""

    item: AnswerItem
    votes: Mapping[str, bool]  # labeller -> whether the answer is labelled right

    @property
    def right(self) -> bool | None:
        """Whether the majority of the labellers labelled the answer right; None means a tie."""
        yes = sum(self.votes.values())
        return None if 2 * yes == len(self.votes) else 2 * yes > len(self.votes)


def read_labels(paths: Sequence[Path]) -> list[LabelledAnswer]:
    """Returns the labelled answers in the files, in order.

    Answers that are only skipped, or whose labels are withdrawn, are excluded. If a file is missing or a line is invalid, raises a
    `UserError` that contains the file, the line number and the problem.
    """
    items: dict[tuple[str, ...], AnswerItem] = {}
    votes: dict[tuple[str, ...], dict[str, bool]] = {}
    for path in paths:
        for item, label, labeller in _labels(path):
            items.setdefault(item.key, item)
            item_votes = votes.setdefault(item.key, {})
            item_votes.pop(labeller, None)
            if label in (RIGHT, WRONG):
                item_votes[labeller] = label == RIGHT
    return [LabelledAnswer(item=items[key], votes=item_votes) for key, item_votes in votes.items() if item_votes]


def merge_duplicates(labelled: Sequence[LabelledAnswer]) -> list[LabelledAnswer]:
    """Merges copies of an answer and their votes.

    A judge returns the same verdict on all copies of an answer, so the copies add no evidence.
    """
    merged: dict[str, tuple[AnswerItem, dict[str, bool]]] = {}
    for answer in labelled:
        item = answer.item
        key = _hash(item.question, item.answer, item.reference, item.messages, dict(item.data))
        votes = merged.setdefault(key, (item, {}))[1]
        votes |= {f"{item.id} {labeller}": right for labeller, right in answer.votes.items()}
    return [LabelledAnswer(item=item, votes=votes) for item, votes in merged.values()]


def preference_pairs(labelled: Sequence[LabelledAnswer], shows: Sequence[PromptField], *, per_task: int) -> list[TextPreference]:
    """Returns pairs of a correct and a wrong answer to the same question, as inputs of a reward model. Each answer is in at most one pair.

    Args:
        shows: see `agentrl.judge.reward_model.RewardRecord`.
        per_task: maximum number of pairs per question.
    """
    questions: dict[tuple[str, str], dict[bool, list[str]]] = {}
    for answer in merge_duplicates(labelled):
        if answer.right is not None:
            item = answer.item
            shown = reward_model_text(shows, item.task(), item.episode(), reference="answer")
            questions.setdefault((item.task_id, item.question), {True: [], False: []})[answer.right].append(shown)
    pairs = [pair for texts in questions.values() for pair in list(zip(texts[True], texts[False], strict=False))[:per_task]]
    return [TextPreference(chosen=right, rejected=wrong) for right, wrong in pairs if right != wrong]


def current_labels(path: Path) -> dict[str, str]:
    """Returns the current label of each answer in a labeller's file, to which lines will be appended. Answers whose label was withdrawn are
    excluded. Raises `UserError` if a line is invalid or the last line is incomplete, because appending would remove it."""
    labels: dict[str, str] = {}
    for item, label, _ in _labels(path, complete=True):
        labels.pop(item.id, None)
        if label != WITHDRAWN:
            labels[item.id] = label
    return labels


def parse_item(line: Mapping[str, Any]) -> AnswerItem:
    """Parses the answer in a line of a label file. Raises `ValueError` if the line is invalid."""
    question, answer = _text(line, "question"), _text(line, "answer")
    reference = line.get("reference", line.get("truth"))
    messages = line.get("messages") or []
    if not isinstance(messages, list) or len(messages) > _MOST_MESSAGES or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages must be a list of at most {_MOST_MESSAGES} objects")
    item = AnswerItem(
        id=str(line.get("id") or _hash(question, answer, messages))[:128],
        task_id=str(line.get("task_id") or _hash(question))[:200],
        question=question,
        answer=answer,
        reference=None if reference is None else text(reference if isinstance(reference, str) else json.dumps(reference)),
        messages=tuple(map(json_object, messages)),
        data=json_object(line.get("data") or {}),
    )
    item.episode()  # raises an error if the messages are invalid
    return item


def _labels(path: Path, *, complete: bool = False) -> Iterator[tuple[AnswerItem, str, str]]:
    """Yields a triple for each line of a label file: the answer, the label and the labeller. Raises `UserError` if a line is invalid.
    Skips the start of a label without a line break, which a killed process may have left, unless `complete` is True."""
    try:
        *lines, last = read_bytes(path, most=_MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        raise UserError(f"there is no label file {path}", fix="run agentrl label RUN to create one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {reason_text(error)}", fix="use a label file") from None
    if last.strip() and (complete or not last.startswith(b"{") or last.rstrip().endswith(b"}")):
        fix = "add a line break, or delete the line if it is incomplete"
        raise UserError(f"{path}:{len(lines) + 1}: the last line does not end with a line break", fix=fix)
    if len(lines) > _MOST_LINES:
        raise UserError(f"{path} has more than {_MOST_LINES:,} lines", fix="split the file")
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            if len(raw) > _LONGEST_LINE:
                raise ValueError(f"the line is longer than {_LONGEST_LINE >> 20} MiB")
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"not valid JSON: {error}") from None
            if not isinstance(line, dict):
                raise ValueError("not a JSON object")
            label = line.get("label")
            if label not in (RIGHT, WRONG, SKIP, WITHDRAWN):
                raise ValueError(f"label must be right, wrong, skip or withdrawn, got {str(label)[:40]!r}")
            item = parse_item(line)
        except ValueError as error:
            fix = "correct the line; agentrl label --help describes its format"
            raise UserError(f"{path}:{number}: {printable(str(error), 300)}", fix=fix) from None
        yield item, str(label), str(line.get("by") or "somebody")[:100]


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[Turn]:
    """Yields a turn for each message of the agent, with the tool results that follow it.

    Messages before the agent's first message are skipped.
    """
    turns: list[tuple[Message, list[ToolResult]]] = []
    for message in messages:
        content = text(message.get("content") or "")
        if message.get("role") == "assistant":
            turns.append((Message(role="assistant", content=content, tool_calls=tuple(_calls(message.get("tool_calls")))), []))
        elif turns:
            turns[-1][1].append(ToolResult(name=str(message.get("role")), output=content, ok=True))
    empty: dict[str, Any] = {"prompt_ids": (), "completion_ids": (), "logprobs": (), "versions": (), "finish_reason": "stop"}
    yield from (Turn(**empty, message=message, tool_results=tuple(results)) for message, results in turns)


def _calls(calls: Any) -> Iterator[ToolCall]:
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            arguments = call.get("arguments")
            yield ToolCall(name=str(call.get("name", "?"))[:200], arguments=arguments if isinstance(arguments, dict) else {})


def _text(line: Mapping[str, Any], key: str) -> str:
    value = line.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a non-empty string")
    return text(value)


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]

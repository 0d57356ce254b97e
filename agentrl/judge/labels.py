"""Labelled answers: one JSON object a line, self-contained, so that a file of them outlives its run.

    {"id": "1f0c...", "label": "right", "by": "anna", "question": "...", "answer": "...", "reference": "...", "messages": [...]}

`question`, `answer` and `label` are enough. The last line of a labeller about an answer counts; `skip` and `withdrawn` say nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base.files import complete_lines
from agentrl.base.user_code import printable
from agentrl.errors import UserError
from agentrl.judge.rendering import PromptField
from agentrl.judge.reward_record import reward_model_text as text_of
from agentrl.records import Episode, Message, SandboxSpec, Split, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.records.fields import json_object, text

RIGHT, WRONG, SKIP, WITHDRAWN = "right", "wrong", "skip", "withdrawn"

_LONGEST_LINE = 8 << 20  # bytes
_MOST_LINES = 200_000
_MOST_MESSAGES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPreference:
    """What a reward model is shown of a right and of a wrong answer to one task."""

    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerItem:
    """An answer to a question, with what is known around it."""

    id: str
    task_id: str
    question: str
    answer: str
    reference: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation, as in a run's `episodes/`
    data: Mapping[str, Any] = field(default_factory=dict)  # further truth for verifiers that want it

    def task(self, *, reference_keys: Iterable[str] = ("answer",)) -> Task:
        """A task for a verifier: the question and the truth, nothing that could be run."""
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
        """The episode of an agent that said and did what `messages` hold, without tokens, and handed in `answer`."""
        task = self.task()
        line = Trajectory(agent="main", turns=tuple(_turns(self.messages)))
        return Episode(id=self.id, task_id=task.id, task_key=task.key, trajectories=(line,) if line.turns else (), answer=self.answer)

    def to_line(self) -> dict[str, Any]:
        """Its part of a line in a file of labels."""
        told = {"id": self.id, "task_id": self.task_id, "question": self.question, "answer": self.answer, "reference": self.reference}
        return {**told, "messages": list(self.messages), **({"data": dict(self.data)} if self.data else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswer:
    """An answer and who says what of it."""

    item: AnswerItem
    votes: Mapping[str, bool]  # by labeller: whether it is right

    @property
    def right(self) -> bool | None:
        """What most labellers say; None where as many say the opposite."""
        yes = sum(self.votes.values())
        return None if 2 * yes == len(self.votes) else 2 * yes > len(self.votes)


def read_labels(paths: Sequence[Path]) -> list[LabelledAnswer]:
    """The labelled answers of some files, in their order. Raises `UserError` that names file, line and what is wrong."""
    items: dict[str, AnswerItem] = {}
    votes: dict[str, dict[str, bool]] = {}
    for path in paths:
        for where, line in _lines(path):
            try:
                item, label, by = _read(line)
            except ValueError as error:
                raise UserError(f"{where}: {printable(str(error), 300)}", fix="see agentrl label --help for the form of a line") from None
            items.setdefault(item.id, item)
            given = votes.setdefault(item.id, {})
            if label in (RIGHT, WRONG):
                given[by] = label == RIGHT
            else:
                given.pop(by, None)
    return [LabelledAnswer(item=items[key], votes=given) for key, given in votes.items() if given]


def merge_duplicates(labelled: Sequence[LabelledAnswer]) -> list[LabelledAnswer]:
    """Each answer once: what a judge is shown twice it answers alike, so that a copy adds no evidence. Votes on copies are put together."""
    found: dict[str, tuple[AnswerItem, dict[str, bool]]] = {}
    for one in labelled:
        item = one.item
        key = _hash(item.question, item.answer, item.reference, item.messages, dict(item.data))
        votes = found.setdefault(key, (item, {}))[1]
        votes |= {f"{item.id} {by}": right for by, right in one.votes.items()}
    return [LabelledAnswer(item=item, votes=votes) for item, votes in found.values()]


def preference_pairs(labelled: Sequence[LabelledAnswer], shows: Sequence[PromptField], *, per_task: int) -> list[TextPreference]:
    """Pairs of a right and a wrong answer to one question, as a reward model is shown them; no answer is in two.

    Args:
        shows: see `agentrl.judge.reward_record.RewardRecord`.
        per_task: at most so many of each question.
    """
    questions: dict[tuple[str, str], dict[bool, list[str]]] = {}
    for one in merge_duplicates(labelled):
        if one.right is not None:
            item = one.item
            shown = text_of(shows, item.task(), item.episode(), reference="answer")
            questions.setdefault((item.task_id, item.question), {True: [], False: []})[one.right].append(shown)
    both = [pair for answers in questions.values() for pair in list(zip(answers[True], answers[False], strict=False))[:per_task]]
    return [TextPreference(chosen=right, rejected=wrong) for right, wrong in both if right != wrong]


def current_labels(path: Path) -> dict[str, str]:
    """The label that each answer in a labeller's file has by now; an answer whose label was withdrawn has none."""
    found: dict[str, str] = {}
    for where, line in _lines(path):
        try:
            item, label, _ = _read(line)
        except ValueError as error:
            raise UserError(f"{where}: {printable(str(error), 300)}", fix="move the file away, or correct the line") from None
        found.pop(item.id, None)
        if label != WITHDRAWN:
            found[item.id] = label
    return found


def parse_item(line: Mapping[str, Any]) -> AnswerItem:
    """The answer that a line is about. Raises `ValueError`."""
    question, answer = _text(line, "question"), _text(line, "answer")
    reference = line.get("reference", line.get("truth"))
    messages = line.get("messages") or []
    if not isinstance(messages, list) or len(messages) > _MOST_MESSAGES or not all(isinstance(one, dict) for one in messages):
        raise ValueError(f"messages is a list of at most {_MOST_MESSAGES} objects")
    made = AnswerItem(
        id=str(line.get("id") or _hash(question, answer, messages))[:128],
        task_id=str(line.get("task_id") or _hash(question))[:200],
        question=question,
        answer=answer,
        reference=None if reference is None else text(reference if isinstance(reference, str) else json.dumps(reference)),
        messages=tuple(json_object(one) for one in messages),
        data=json_object(line.get("data") or {}),
    )
    made.episode()  # raises for messages that are none
    return made


def _read(line: Mapping[str, Any]) -> tuple[AnswerItem, str, str]:
    label = line.get("label")
    if label not in (RIGHT, WRONG, SKIP, WITHDRAWN):
        raise ValueError(f"label is right, wrong, skip or withdrawn, got {str(label)[:40]!r}")
    return parse_item(line), str(label), str(line.get("by") or "somebody")[:100]


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        lines = complete_lines(path)
    except OSError as error:
        raise UserError(f"{path}: {error}", fix="give a file of labels") from None
    if not path.exists():
        raise UserError(f"no file of labels {path}", fix="agentrl label RUN writes one")
    if len(lines) > _MOST_LINES:
        raise UserError(f"{path} has more than {_MOST_LINES:,} lines", fix="take a part of it")
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            if len(raw) > _LONGEST_LINE:
                raise ValueError(f"longer than {_LONGEST_LINE >> 20} MiB")
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number} is no JSON: {str(error)[:200]}", fix="correct the line") from None
        if not isinstance(value, dict):
            raise UserError(f"{path}:{number} is no JSON object", fix="correct the line")
        yield f"{path}:{number}", value


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[Turn]:
    """What the agent said, each with what its tools gave; what it was told before is left out."""
    said: Message | None = None
    results: list[ToolResult] = []
    for one in messages:
        content = text(one.get("content") or "")
        if one.get("role") == "assistant":
            if said is not None:
                yield _turn(said, results)
            said, results = Message(role="assistant", content=content, tool_calls=tuple(_calls(one.get("tool_calls")))), []
        elif said is not None:
            results.append(ToolResult(name=str(one.get("role")), output=content, ok=True))
    if said is not None:
        yield _turn(said, results)


def _turn(said: Message, results: Sequence[ToolResult]) -> Turn:
    return Turn(prompt_ids=(), completion_ids=(), logprobs=(), versions=(), message=said, finish_reason="stop", tool_results=tuple(results))


def _calls(calls: Any) -> Iterator[ToolCall]:
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            arguments = call.get("arguments")
            yield ToolCall(name=str(call.get("name", "?"))[:200], arguments=arguments if isinstance(arguments, dict) else {})


def _text(line: Mapping[str, Any], key: str) -> str:
    value = line.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} is a text that is not empty")
    return text(value)


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]

"""Interactive labelling of a run's answers in random order, one key per label.

Each label is saved immediately, so a session can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.base.files import append_lines, complete_lines, json_line
from agentrl.base.user_code import clip, printable
from agentrl.errors import UserError
from agentrl.judge.labels import RIGHT, SKIP, WITHDRAWN, WRONG, AnswerItem, current_labels, parse_item

KEYS = {"r": RIGHT, "w": WRONG, "s": SKIP}
UNDO, QUIT = "u", "q"
KEY_HELP = "[r]ight  [w]rong  [s]kip  [u]ndo  [q]uit"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LONGEST_LINE = 8 << 20
_MAX_SHOWN = 6000  # maximum number of characters shown of one string


def labels_file(run: Path, by: str) -> Path:
    """Returns the path of the file with a labeller's labels for a run. Raises `UserError` if the labeller's name is invalid."""
    if not _NAME.fullmatch(by):
        raise UserError(
            f"{printable(by, 80)!r} is not a valid labeller name", fix="use letters, digits, dots and dashes, such as --by anna"
        )
    return run / "labels" / f"{by}.jsonl"


def run_answers(run: Path, *, phase: str = "") -> list[AnswerItem]:
    """Returns the distinct answers of a run, in a random but deterministic order. Raises `UserError` if there are no answers.

    Args:
        phase: return only the answers of this phase, such as "after"; empty means all phases. A phase is the name of a file in `episodes/`.
    """
    folder = run / "episodes"
    if not folder.is_dir():
        raise UserError(f"{run} has no episodes", fix="use the folder of a run, such as runs/quickstart")
    answers = {item.id: item for path in sorted(folder.glob("*.jsonl")) if phase in ("", path.stem) for item in _items(path)}
    if not answers:
        raise UserError(f"{folder} has no answers{f' of phase {phase}' if phase else ''}", fix="use a different run or a different --phase")
    return sorted(answers.values(), key=lambda item: hashlib.sha256(item.id.encode()).digest())


@dataclass(slots=True, kw_only=True)
class LabellingSession:
    """A session in which one labeller labels answers."""

    items: list[AnswerItem]
    path: Path
    by: str
    blind: bool = False  # do not show the reference
    done: dict[str, str] = field(init=False)
    _order: list[str] = field(init=False)  # ids of the answers whose labels can be undone, the newest last

    def __post_init__(self) -> None:
        self.done = current_labels(self.path) if self.path.exists() else {}
        self._order = list(self.done)

    def run(self, keys: Iterable[str], show: Callable[[str], None]) -> None:
        """Shows answers until all are labelled, `keys` is exhausted, or the labeller quits. Each label is saved before it is confirmed.

        Args:
            keys: the keys that the labeller presses, as single characters; white space is ignored.
        """
        pressed = iter(keys)
        while (item := next((candidate for candidate in self.items if candidate.id not in self.done), None)) is not None:
            show(f"{self.render_item(item)}\n\n{KEY_HELP}")
            key = next((key.lower() for key in pressed if not key.isspace()), QUIT)
            if key == QUIT:
                return
            if key == UNDO:
                show(self._undo())
            elif key in KEYS:
                self.save(item, KEYS[key])
                show(f"-> {KEYS[key]}")
            else:
                show(f"unknown key {printable(key, 1)!r}")
        show("all answers are labelled")

    def render_item(self, item: AnswerItem) -> str:
        """Returns an answer as text for a terminal, without control characters."""
        number = sum(other.id in self.done for other in self.items) + 1
        parts = [("question", item.question), *_conversation(item)]
        if item.reference is not None and not self.blind:
            parts.append(("reference", item.reference))
        parts.append(("ANSWER", item.answer))
        title = f"{number} of {len(self.items)}: {printable(item.task_id, 120)}"
        return "\n".join([f"\n=== {title}", *(f"--- {name}\n{_safe(text)}" for name, text in parts)])

    def save(self, item: AnswerItem, label: str) -> None:
        """Appends the label of an answer to the labeller's file, durably."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        append_lines(self.path, [json_line({**item.to_line(), "label": label, "by": self.by, "at": at})], durable=True)
        if label == WITHDRAWN:
            self.done.pop(item.id, None)
        else:
            self.done[item.id] = label
            self._order.append(item.id)

    def _undo(self) -> str:
        while self._order:
            last = self._order.pop()
            item = next((candidate for candidate in self.items if candidate.id == last), None)
            if item is not None and last in self.done:
                self.save(item, WITHDRAWN)
                return "-> withdrawn"
        return "nothing to undo"


def _conversation(item: AnswerItem) -> Iterator[tuple[str, str]]:
    """Yields pairs (role, text) for the messages of a conversation after the question."""
    started = False
    for message in item.messages:
        role = str(message.get("role", "?"))
        started = started or role == "assistant"
        if not started:
            continue
        calls = [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]
        call_texts = [f"calls {call.get('name', '?')}: {json.dumps(call.get('arguments'), ensure_ascii=False)}" for call in calls]
        text = "\n".join([str(message.get("content") or ""), *call_texts]).strip()
        if text:
            yield ("agent" if role == "assistant" else printable(role, 40)), text


def _safe(text: str) -> str:
    shortened = clip(text, _MAX_SHOWN).expandtabs(4).replace("\r\n", "\n")
    return printable(shortened, len(shortened))


def _items(path: Path) -> Iterator[AnswerItem]:
    """Yields the answers in a file of episodes. Skips unreadable lines, such as lines written by a newer version of agentrl."""
    for raw in complete_lines(path):
        if len(raw) > _LONGEST_LINE:
            continue
        try:
            line = json.loads(raw)
            if isinstance(line, dict) and not line.get("left_out"):
                yield parse_item({key: line[key] for key in ("task_id", "question", "answer", "truth", "messages") if key in line})
        except (ValueError, RecursionError, TypeError):
            continue

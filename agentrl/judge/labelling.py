"""A person labels a run's episodes: shown one after another in an order of chance, a key each, kept at once and gone on with later."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.base.files import append_lines, complete_lines, json_line
from agentrl.base.user_code import printable
from agentrl.errors import UserError
from agentrl.judge.labels import RIGHT, SKIP, WITHDRAWN, WRONG, AnswerItem, current_labels, parse_item

KEYS = {"r": RIGHT, "w": WRONG, "s": SKIP}
UNDO, QUIT = "u", "q"
KEY_HELP = "[r]ight  [w]rong  [s]kip  [u]ndo  [q]uit"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LONGEST_LINE = 8 << 20
_SHOWN = 6000  # characters of one text


def labels_file(run: Path, by: str) -> Path:
    """Where a labeller's verdicts on a run are kept. Raises `UserError` for a name that is no name of a file."""
    if not _NAME.fullmatch(by):
        raise UserError(f"{printable(by, 80)!r} is no labeller's name", fix="letters, digits, dots, dashes: --by anna")
    return run / "labels" / f"{by}.jsonl"


def run_answers(run: Path, *, phase: str = "") -> list[AnswerItem]:
    """The answers that a run's agents handed in, each once, in an order that chance decides and that stays the same.

    Raises `UserError` where there are none.

    Args:
        phase: of one phase only, such as "after": the name of a file in `episodes/`.
    """
    folder = run / "episodes"
    if not folder.is_dir():
        raise UserError(f"{run} has no episodes", fix="give the folder of a run, such as runs/quickstart")
    found = {item.id: item for path in sorted(folder.glob("*.jsonl")) if phase in ("", path.stem) for item in _items(path)}
    if not found:
        raise UserError(f"{folder} holds no answers{f' of phase {phase}' if phase else ''}", fix="give another run, or another --phase")
    return sorted(found.values(), key=lambda item: hashlib.sha256(item.id.encode()).digest())


@dataclass(slots=True, kw_only=True)
class LabellingSession:
    """One sitting of one labeller."""

    items: list[AnswerItem]
    path: Path
    by: str
    blind: bool = False  # do not show the reference
    done: dict[str, str] = field(init=False)
    _order: list[str] = field(init=False)  # ids that were labelled, the newest last: what undo takes back

    def __post_init__(self) -> None:
        self.done = current_labels(self.path) if self.path.exists() else {}
        self._order = list(self.done)

    def run(self, keys: Iterable[str], show: Callable[[str], None]) -> None:
        """Shows answers until all are labelled, the keys end, or one of them quits. Every verdict is on the disk when it is shown.

        Args:
            keys: single characters; those without a meaning are told, white space is passed over.
        """
        pressed = iter(keys)
        while (item := next((one for one in self.items if one.id not in self.done), None)) is not None:
            show(f"{self.render_item(item)}\n\n{KEY_HELP}")
            key = next((key.lower() for key in pressed if not key.isspace()), QUIT)
            if key == QUIT:
                return
            if key == UNDO:
                show(self._undo())
            elif key in KEYS:
                self._keep(item, KEYS[key])
                show(f"-> {KEYS[key]}")
            else:
                show(f"no verdict has the key {printable(key, 1)!r}")
        show("every answer has a label")

    def render_item(self, item: AnswerItem) -> str:
        """An answer as a person reads it. What agents and tools wrote cannot speak to the terminal."""
        number = sum(one.id in self.done for one in self.items) + 1
        parts = [("question", item.question), *_said(item)]
        if item.reference is not None and not self.blind:
            parts.append(("reference", item.reference))
        parts.append(("ANSWER", item.answer))
        title = f"{number} of {len(self.items)}: {printable(item.task_id, 120)}"
        return "\n".join([f"\n=== {title}", *(f"--- {name}\n{_safe(text)}" for name, text in parts)])

    def _keep(self, item: AnswerItem, label: str) -> None:
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
            item = next((one for one in self.items if one.id == last), None)
            if item is not None and last in self.done:
                self._keep(item, WITHDRAWN)
                return "-> taken back"
        return "nothing to take back"


def _said(item: AnswerItem) -> Iterator[tuple[str, str]]:
    """The conversation after the question."""
    began = False
    for message in item.messages:
        role = str(message.get("role", "?"))
        began = began or role == "assistant"
        if not began:
            continue
        calls = [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]
        told = [f"calls {call.get('name', '?')}: {json.dumps(call.get('arguments'), ensure_ascii=False)}" for call in calls]
        text = "\n".join([str(message.get("content") or ""), *told]).strip()
        if text:
            yield ("agent" if role == "assistant" else printable(role, 40)), text


def _safe(text: str) -> str:
    cut = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}\n[... {len(text) - _SHOWN:,} characters ...]\n{text[-_SHOWN // 2 :]}"
    cut = cut.expandtabs(4).replace("\r\n", "\n")
    return printable(cut, len(cut))


def _items(path: Path) -> Iterator[AnswerItem]:
    """Those of the lines that hold an answer; a line that cannot be read is passed over, as one of a newer version would be."""
    for raw in complete_lines(path):
        if len(raw) > _LONGEST_LINE:
            continue
        try:
            line = json.loads(raw)
            if isinstance(line, dict) and not line.get("left_out"):
                yield parse_item({key: line[key] for key in ("task_id", "question", "answer", "truth", "messages") if key in line})
        except (ValueError, RecursionError, TypeError):
            continue

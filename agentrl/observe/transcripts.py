"""Prepares episodes for display, such as episodes of the same task before and after training.

`templates/episode.html` shows the episodes as chat bubbles.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.base.numbers import all_equal, is_above
from agentrl.observe.rundata import as_list

Transcript = Mapping[str, Any]
Pair = tuple[Transcript, Transcript]  # before, after

_MAX_CHARS = 8000  # maximum number of characters in one message
_SPLITS = {"heldout": "held-out task", "heldout_real": "held-out task on real data", "train": "training task"}
_ROLES = {"system": "instructions", "user": "question", "assistant": "agent", "tool": "sandbox"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """A message of a conversation as a chat bubble."""

    style: str
    role: str
    content: str
    as_typed: bool  # in a fixed-width font, with line breaks
    calls: tuple[tuple[str, str], ...]  # tool, arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """One episode as the report shows it."""

    title: str
    question: str
    kind: str
    versions: str
    bubbles: tuple[Bubble, ...]
    others: tuple[tuple[str, tuple[Bubble, ...]], ...]  # title and messages of each sub-agent or of each trajectory after compaction
    outcome: tuple[tuple[str, str], ...]  # name, value
    badge: tuple[str, str]  # score, style


def choose_pairs(before: Sequence[Transcript], after: Sequence[Transcript], wanted: int) -> list[Pair]:
    """Chooses at most `wanted` informative pairs of episodes of the same task before and after training.

    Gains are chosen first, from each kind and split, then losses, then tasks that still fail.
    """
    first = {_key(item): item for item in before}
    pairs = [(first[_key(item)], item) for item in after if _key(item) in first]
    gained = _one_of_each([pair for pair in pairs if is_above(_value(pair[1]), _value(pair[0]))])
    lost = [pair for pair in pairs if is_above(_value(pair[0]), _value(pair[1]))]
    same = [pair for pair in pairs if pair not in gained and pair not in lost and all_equal(map(_value, pair))]
    failing = [pair for pair in same if pair[1].get("outcome") != "solved"]
    rest = [pair for pair in same if pair not in failing]
    chosen = gained[: max(wanted - 2, 1)] + lost[:1] + failing[:1]
    return (chosen + [pair for pair in gained + lost + failing + rest if pair not in chosen])[:wanted]


def show_episode(item: Transcript, title: str = "") -> ShownEpisode:
    """Returns one episode as the report shows it. The default title contains the phase and the step."""
    split = _text(item, "split")
    kind = (_text(item, "kind").replace("_", " "), _SPLITS.get(split, split))
    answer, truth = item.get("answer"), item.get("truth")
    outcome = [
        ("answer", "(none)" if answer is None else str(answer)),
        ("truth", "(not recorded)" if truth is None else str(truth)),
        ("ended by", _text(item, "stop_reason") or "?"),
    ]
    if item.get("reason"):
        outcome.append(("note", str(item["reason"])))
    others = [other for other in as_list(item.get("trajectories")) if isinstance(other, dict)]
    return ShownEpisode(
        title=title or f"{_text(item, 'phase')}, step {item.get('step', '?')}",
        question=_cut(_text(item, "question") or _text(item, "task_id")),
        kind=" · ".join(part for part in kind if part),
        versions=", ".join(map(str, as_list(item.get("versions")))) or "?",
        bubbles=_bubbles(item),
        others=tuple((f"{_text(other, 'agent')}, ended by {_text(other, 'stop_reason') or '?'}", _bubbles(other)) for other in others),
        outcome=tuple((name, _cut(value)) for name, value in outcome),
        badge=_badge(item),
    )


def show_failure(item: Transcript) -> ShownEpisode:
    """Returns a captured failure as the report shows it, with its tag and the first turn in which it is visible, counted from 1."""
    turn = item.get("turn")
    where = f", turn {turn + 1}" if isinstance(turn, int) else ""
    shown = show_episode(item)
    failure = (("failure", f"{_text(item, 'tag').replace('_', ' ')}{where}"), ("note", _text(item, "note") or "(none)"))
    return replace(shown, outcome=(*failure, *shown.outcome))


def _bubbles(item: Transcript) -> tuple[Bubble, ...]:
    return tuple(_bubble(message) for message in as_list(item.get("messages")) if isinstance(message, dict))


def _bubble(message: Mapping[str, Any]) -> Bubble:
    role = str(message.get("role", ""))
    content = str(message.get("content") or "")
    return Bubble(
        style=role if role in _ROLES else "other",
        role=_ROLES.get(role, role),
        content=_cut(content) if content.strip() else "",
        as_typed=role in ("tool", "assistant"),
        calls=tuple(_call(call) for call in as_list(message.get("tool_calls")) if isinstance(call, dict)),
    )


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    arguments = call.get("arguments")
    if isinstance(arguments, dict) and len(arguments) == 1 and isinstance(only := next(iter(arguments.values())), str):
        shown = only  # code and answers are easier to read without JSON
    else:
        shown = json.dumps(arguments, indent=2, ensure_ascii=False)
    return _cut(str(call.get("name", "?"))), _cut(shown)


def _badge(item: Transcript) -> tuple[str, str]:
    score = item.get("score")
    if item.get("left_out") or not isinstance(score, int | float):
        return "excluded", "none"
    return f"{score:g}", {"solved": "good", "failed": "bad"}.get(str(item.get("outcome")), "part")


def _one_of_each(pairs: list[Pair]) -> list[Pair]:
    """Orders pairs so that each split and kind occurs early. Of the pairs of one kind, the pair with the longest conversation is first."""
    ordered = sorted(pairs, key=lambda pair: len(as_list(pair[1].get("messages"))), reverse=True)
    seen: Counter[str] = Counter()
    rank: dict[int, tuple[int, int]] = {}
    for number, (_, after) in enumerate(ordered):
        split, kind = _text(after, "split"), f"{_text(after, 'split')}/{_text(after, 'kind')}"
        seen[kind] += 1
        seen[split] += seen[kind] == 1
        rank[number] = (seen[kind], seen[split])
    return [ordered[number] for number in sorted(rank, key=rank.__getitem__)]


def _key(item: Transcript) -> tuple[str, str]:
    return _text(item, "split"), _text(item, "task_id")


def _value(item: Transcript) -> float:
    """Returns the score of an episode for comparisons; -1 if the episode is unscored."""
    score = item.get("score")
    return float(score) if isinstance(score, int | float) and not item.get("left_out") else -1.0


def _text(item: Transcript, key: str) -> str:
    value = item.get(key)
    return "" if value is None else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}\n[{len(text) - _MAX_CHARS:,} more characters]"

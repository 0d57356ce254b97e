"""Whole episodes to read: the same task before and after training, as chat bubbles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.observe.markup import Html, element, escape, join

Transcript = Mapping[str, Any]
Pair = tuple[Transcript, Transcript]  # before, after

_LONGEST = 8000  # characters of one message; a page stays readable whatever a sandbox printed
_SPLITS = {"heldout": "held-out task", "heldout_real": "held-out task on real data", "train": "training task"}
_ROLES = {"system": "instructions", "user": "question", "assistant": "agent", "tool": "sandbox"}


def choose_pairs(before: Sequence[Transcript], after: Sequence[Transcript], wanted: int) -> list[Pair]:
    """Pairs of the same task that say the most: what was learned (each kind and split once), then what went wrong or stayed wrong."""
    first = {_key(item): item for item in before}
    pairs = [(first[_key(item)], item) for item in after if _key(item) in first]
    gained = _one_of_each([pair for pair in pairs if _value(pair[1]) > _value(pair[0])])
    lost = [pair for pair in pairs if _value(pair[1]) < _value(pair[0])]
    failing = [pair for pair in pairs if _value(pair[0]) == _value(pair[1]) < 1]
    rest = [pair for pair in pairs if _value(pair[0]) == _value(pair[1]) >= 1]
    chosen = gained[: max(wanted - 2, 1)] + lost[:1] + failing[:1]
    return (chosen + [pair for pair in gained + lost + failing + rest if pair not in chosen])[:wanted]


def render_pair(before: Transcript, after: Transcript) -> Html:
    """One task, attempted before and after training, side by side where there is room."""
    sides = [_side("before training", before), _side("after training", after)]
    return _foldable(after, [_badge(before), escape(" → "), _badge(after)], sides)


def render_single(item: Transcript) -> Html:
    """One episode alone."""
    return _foldable(item, [_badge(item)], [_side(f"{_text(item, 'phase')}, step {item.get('step', '?')}", item)])


def _foldable(item: Transcript, badges: Iterable[Html], sides: Sequence[Html]) -> Html:
    title = element("span", _cut(_text(item, "question") or _text(item, "task_id")), class_="question")
    kind = element(
        "span",
        " · ".join(
            part for part in (_text(item, "kind").replace("_", " "), _SPLITS.get(_text(item, "split"), _text(item, "split"))) if part
        ),
        class_="kind",
    )
    head = element("summary", element("span", title, kind, class_="what"), element("span", *badges, class_="badges"))
    return element("details", head, element("div", *sides, class_=f"sides n{len(sides)}"), class_="episode")


def _side(title: str, item: Transcript) -> Html:
    versions = ", ".join(map(str, item.get("versions") or [])) or "?"
    caption = element("h4", title, element("small", f"policy version {versions}"))
    bubbles = [_bubble(message) for message in item.get("messages") or [] if isinstance(message, dict)]
    return element("section", caption, *bubbles, _outcome(item), class_="side")


def _bubble(message: Mapping[str, Any]) -> Html:
    role = str(message.get("role", ""))
    style = role if role in _ROLES else "other"
    content = str(message.get("content") or "")
    calls = [_call(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    body = element("pre" if role in ("tool", "assistant") else "p", _cut(content)) if content.strip() else None
    if body is None and not calls:
        body = element("p", "(nothing)", class_="empty")
    return element("div", element("span", _ROLES.get(role, role), class_="role"), body, *calls, class_=f"bubble {style}")


def _call(call: Mapping[str, Any]) -> Html:
    arguments = call.get("arguments")
    if isinstance(arguments, dict) and len(arguments) == 1 and isinstance(only := next(iter(arguments.values())), str):
        shown = only  # code and answers read best as they are
    else:
        shown = json.dumps(arguments, indent=2, ensure_ascii=False)
    return element("div", element("span", _cut(str(call.get("name", "?"))), class_="tool-name"), element("pre", _cut(shown)), class_="call")


def _outcome(item: Transcript) -> Html:
    answer = item.get("answer")
    rows = [
        ("answer", "(none)" if answer is None else str(answer)),
        ("truth", "(not recorded)" if item.get("truth") is None else str(item["truth"])),
        ("ended by", _text(item, "stop_reason") or "?"),
    ]
    if item.get("reason"):
        rows.append(("note", str(item["reason"])))
    cells = [join((element("dt", name), element("dd", _cut(value)))) for name, value in rows]
    return element("dl", *cells, element("dt", "score"), element("dd", _badge(item)), class_="outcome")


def _badge(item: Transcript) -> Html:
    score = item.get("score")
    if item.get("left_out") or not isinstance(score, int | float):
        return element("b", "left out", class_="badge none")
    return element("b", f"{score:g}", class_=f"badge {'good' if score >= 1 else 'bad' if score <= 0 else 'part'}")


def _one_of_each(pairs: list[Pair]) -> list[Pair]:
    """The pairs in an order that shows every split and kind early; of one kind, the longest conversation first."""
    ordered = sorted(pairs, key=lambda pair: len(pair[1].get("messages") or []), reverse=True)
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


def _value(pair_side: Transcript) -> float:
    """The score for sorting only: an unscored episode sorts below every score."""
    score = pair_side.get("score")
    return float(score) if isinstance(score, int | float) and not pair_side.get("left_out") else -1.0


def _text(item: Transcript, key: str) -> str:
    value = item.get(key)
    return "" if value is None else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\n[{len(text) - _LONGEST:,} more characters]"

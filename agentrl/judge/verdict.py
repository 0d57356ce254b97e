"""A judge's words as a verdict, or as unreadable. Nothing is guessed: a verdict is one JSON object with exactly the numbers asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from agentrl.reward.configured import strip_code_fence

MAX_REASONING = 4000
"""Characters kept of what a judge gives as its reasons."""

_OPENS = re.compile(r"\s*(<think>|\[THINK\])")
_MARKS = {"<think>": re.compile(r"(<think>)|</think>"), "[THINK]": re.compile(r"(\[THINK\])|\[/THINK\]")}
_LINE = 2000  # characters that are searched for the start of a quotation
_CLOSES = re.compile(r"</think>|\[/THINK\]")
_QUOTES = re.compile(r"(?:[\"'`:(\[{<>=\u201c\u2018\u00ab]|[^\s.!?\u2026)][ \t]+)\Z|\n[ \t]*>[^\n]*\Z")
"""The end of a text that quotes what follows, such as `It says "` or `The answer contains `. Thoughts end with a line or a sentence."""


class Unreadable(ValueError):
    """What a judge said is no verdict; the message says why."""


class Abstained(ValueError):
    """The judge says that it cannot tell."""


def json_object(text: str, *, thought_apart: bool = False) -> dict[str, Any]:
    """The JSON object that a text consists of, alone or as its only fenced block. Skips reasoning before it, also if the prompt has opened
    the reasoning block.

    Args:
        thought_apart: whether the server returned the reasoning separately, so that `text` has none.

    Raises `Unreadable` for anything else: prose around an object, two objects, a key that comes twice, NaN, an object after a reasoning
    block that the text only quotes.
    """
    text = strip_code_fence((text if thought_apart else _after_thought(text)).strip(), "json")
    if not text:
        raise Unreadable("says nothing")
    if not text.startswith("{"):
        raise Unreadable("is no JSON object")
    try:
        value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
    except Unreadable:
        raise
    except (ValueError, RecursionError):
        raise Unreadable("is broken JSON") from None
    if not isinstance(value, dict):
        raise Unreadable("is no JSON object")
    return value


def _after_thought(text: str) -> str:
    """What follows the judge's own reasoning block, the outermost one. Raises `Unreadable` if it is not closed, or is only quoted.

    The judged text may contain `</think>` and a verdict, and a judge may quote it.
    """
    if (opened := _OPENS.match(text)) is not None:
        depth = 0
        for mark in _MARKS[opened[1]].finditer(text):
            depth += 1 if mark[1] else -1
            if depth == 0:
                return text[mark.end() :]
        raise Unreadable("does not end its reasoning")
    closed = _CLOSES.search(text)
    if closed is None or text.lstrip()[:1] in ("{", "`"):
        return text
    before = text[: closed.start()]
    if _QUOTES.search(before[-_LINE:]) or before.count("```") % 2:
        raise Unreadable("quotes the end of a reasoning block")
    return text[closed.end() :]


def whole_number(value: Any, *, low: int, high: int, name: str) -> int:
    """A whole number within its range; texts, truth values and fractions are none. Raises `Unreadable`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable(f"gives no number for {name}")
    if not low <= value <= high:
        raise Unreadable(f"gives a number outside of {low} to {high} for {name}")
    if value != int(value):
        raise Unreadable(f"gives no whole number for {name}")
    return int(value)


def numbers(verdict: Mapping[str, Any], wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """The number of each criterion, by name. Raises `Abstained` or `Unreadable`.

    Args:
        wanted: lowest and highest number of each.
    """
    _may_abstain(verdict)
    scores = verdict.get("scores")
    if not isinstance(scores, dict) or set(scores) != set(wanted):
        raise Unreadable(f"does not hold scores for {', '.join(wanted)}, and for nothing else")
    return {name: whole_number(scores[name], low=low, high=high, name=name) for name, (low, high) in wanted.items()}


def choice(verdict: Mapping[str, Any], key: str, among: Sequence[str]) -> str:
    """One of a few words. Raises `Abstained` or `Unreadable`."""
    _may_abstain(verdict)
    if verdict.get(key) not in among or not isinstance(verdict[key], str):
        raise Unreadable(f"gives none of {', '.join(among)} for {key}")
    return str(verdict[key])


def ranking(verdict: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """The numbers 1 to `count`, each once, best first. Raises `Abstained` or `Unreadable`."""
    _may_abstain(verdict)
    order = verdict.get("ranking")
    if not isinstance(order, list) or len(order) != count:
        raise Unreadable(f"does not rank {count} answers")
    places = tuple(whole_number(one, low=1, high=count, name="a place") for one in order)
    if len(set(places)) != count:
        raise Unreadable("ranks an answer twice")
    return places


def reasoning(verdict: Mapping[str, Any]) -> str:
    said = verdict.get("reasoning")
    return said[:MAX_REASONING] if isinstance(said, str) else ""


def schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a verdict: reasons first, so that they are written before the numbers, and the way to abstain last."""
    every = {"reasoning": {"type": "string"}, **properties, "abstain": {"type": "boolean"}}
    return {"type": "object", "properties": every, "required": list(every), "additionalProperties": False}


def _may_abstain(verdict: Mapping[str, Any]) -> None:
    abstains = verdict.get("abstain", False)
    if abstains is True:
        raise Abstained("the judge abstains")
    if abstains is not False:
        raise Unreadable("gives neither true nor false for abstain")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Unreadable("gives a key twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise Unreadable(f"holds {text}")

"""Parses the replies of judges. A verdict is exactly one JSON object with the requested fields. Any other reply is unreadable."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from agentrl.reward.configured import strip_code_fence

MAX_REASONING = 4000  # maximum length of a judge's reasoning, in characters

_OPENS = re.compile(r"\s*(<think>|\[THINK\])")
_MARKS = {"<think>": re.compile(r"(<think>)|</think>"), "[THINK]": re.compile(r"(\[THINK\])|\[/THINK\]")}
_LINE = 2000  # number of characters searched for the start of a quotation
_CLOSES = re.compile(r"</think>|\[/THINK\]")
_QUOTES = re.compile(r"(?:[\"'`:(\[{<>=\u201c\u2018\u00ab]|[^\s.!?\u2026)][ \t]+)\Z|\n[ \t]*>[^\n]*\Z")
"""Matches text before a quotation, such as `It says "` or `The answer contains `. Reasoning ends with a complete line or sentence."""


class Unreadable(ValueError):
    """Raised if a judge's reply is not a verdict. The message contains the reason."""


class Abstained(ValueError):
    """Raised if the judge abstains from a verdict."""


def json_object(text: str, *, thought_apart: bool = False) -> dict[str, Any]:
    """Parses text that consists of one JSON object, either bare or as the only fenced block.

    Skips reasoning before the object, even if the reasoning block was opened in the prompt.

    Args:
        thought_apart: whether the server returned the reasoning separately, so that `text` contains none.

    Raises `Unreadable` for any other text, such as text around an object, two objects, a repeated key, NaN, or an object after a reasoning
    block that the text only quotes.
    """
    text = strip_code_fence((text if thought_apart else _after_thought(text)).strip(), "json")
    if not text:
        raise Unreadable("is empty")
    if not text.startswith("{"):
        raise Unreadable("is not a JSON object")
    try:
        value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
    except Unreadable:
        raise
    except (ValueError, RecursionError):
        raise Unreadable("is not valid JSON") from None
    if not isinstance(value, dict):
        raise Unreadable("is not a JSON object")
    return value


def _after_thought(text: str) -> str:
    """Returns the text after the judge's outermost reasoning block.

    Raises `Unreadable` if the reasoning block is not closed, or if its end is only quoted.

    A judge may quote judged text that contains `</think>` and a verdict.
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
    """Returns `value` if it is a whole number from `low` to `high`.

    Raises `Unreadable` for any other value, such as a string or a boolean.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable(f"has no number for {name}")
    if not low <= value <= high:
        raise Unreadable(f"has a number outside of {low} to {high} for {name}")
    if value != int(value):
        raise Unreadable(f"has no whole number for {name}")
    return int(value)


def numbers(verdict: Mapping[str, Any], wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Returns the numbers in a verdict, as a mapping from criterion to number.

    Raises `Abstained` or `Unreadable` if there is no valid verdict.

    Args:
        wanted: criterion -> (lowest, highest) allowed number.
    """
    _may_abstain(verdict)
    scores = verdict.get("scores")
    if not isinstance(scores, dict) or set(scores) != set(wanted):
        raise Unreadable(f"does not have scores for exactly {', '.join(wanted)}")
    return {name: whole_number(scores[name], low=low, high=high, name=name) for name, (low, high) in wanted.items()}


def choice(verdict: Mapping[str, Any], key: str, among: Sequence[str]) -> str:
    """Returns the value of `key` in a verdict, which must be one of `among`.

    Raises `Abstained` or `Unreadable` if there is no valid verdict.
    """
    _may_abstain(verdict)
    if verdict.get(key) not in among or not isinstance(verdict[key], str):
        raise Unreadable(f"has none of {', '.join(among)} for {key}")
    return str(verdict[key])


def ranking(verdict: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Returns the ranking in a verdict: the numbers 1 to `count`, each once, the best first.

    Raises `Abstained` or `Unreadable` if there is no valid verdict.
    """
    _may_abstain(verdict)
    order = verdict.get("ranking")
    if not isinstance(order, list) or len(order) != count:
        raise Unreadable(f"does not rank {count} answers")
    ranks = tuple(whole_number(entry, low=1, high=count, name="a place") for entry in order)
    if len(set(ranks)) != count:
        raise Unreadable("ranks an answer twice")
    return ranks


def reasoning(verdict: Mapping[str, Any]) -> str:
    """Returns the reasoning in a verdict; empty if the verdict contains no reasoning."""
    text = verdict.get("reasoning")
    return text[:MAX_REASONING] if isinstance(text, str) else ""


def schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a verdict. The reasoning is first, so that it is written before the numbers. `abstain` is last."""
    fields = {"reasoning": {"type": "string"}, **properties, "abstain": {"type": "boolean"}}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _may_abstain(verdict: Mapping[str, Any]) -> None:
    abstains = verdict.get("abstain", False)
    if abstains is True:
        raise Abstained("the judge abstains")
    if abstains is not False:
        raise Unreadable("has neither true nor false for abstain")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise Unreadable("repeats a key")
    return fields


def _no_number(text: str) -> NoReturn:
    raise Unreadable(f"contains {text}")

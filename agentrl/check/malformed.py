"""Malformed inputs that a model may write: answers and files for verifiers, arguments for tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HALF_EMOJI = "\ud83d"

ANSWERS: Mapping[str, str | None] = {
    "no answer": None,
    "half an emoji": HALF_EMOJI,
    "a NUL": "\0",
    "digits of another script": "\u0661\u0662\u0663",
    "4,301 digits": "1" * 4301,
    "a million spaces": " " * 1_000_000,
    "two megabytes": "x" * 2_000_000,
    "deep brackets": "[" * 100_000,
    "negative nan": "-nan",
    "a fraction by nothing": "1/0",
}

FILES: Mapping[str, bytes] = {
    "not text": b"\xff\xfe\x00\x80",
    "half an emoji in bytes": b"\xed\xa0\xbd",
    "deep brackets": b"[" * 100_000,
    "a megabyte on one line": b"x" * (1 << 20),
}


def arguments(properties: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Description -> malformed arguments of one call, for a tool with these parameters."""
    names = list(properties) or ["x"]
    nested: Any = "x"
    for _ in range(60):
        nested = {"x": nested}
    values: dict[str, Any] = {
        "null": None,
        "a number": 1.5,
        "a whole number of 400 digits": 10**400,
        "true": True,
        "a list": [1, "x", None],
        "an object": {"x": {"y": []}},
        "60 objects in one another": nested,
        "an empty text": "",
        "half an emoji": HALF_EMOJI,
        "a NUL": "a\0b",
        "huge text": "x" * 300_000,
        "a path that leaves": "../../etc/passwd",
    }
    cases = {f"{description} for everything": dict.fromkeys(names, value) for description, value in values.items()}
    cases["no arguments"] = {}
    cases["an unknown argument"] = {**dict.fromkeys(names, "x"), "unheard_of": 1}
    if len(names) > 1:
        cases |= {f"{name} missing": {other: "x" for other in names if other != name} for name in names}
    return cases

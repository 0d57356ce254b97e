"""Parses rewards in Harbor's format: a number in reward.txt, or a number in the JSON object of reward.json."""

from __future__ import annotations

import json
import math
from typing import Any

KEY = "reward"


def reward(txt: str | None, as_json: str | None) -> tuple[float | None, str]:
    """Returns the reward, from 0 to 1, and what is wrong with it; None if neither file exists. Any program in the sandbox may have written
    them.
    """
    if txt is not None and txt.strip():
        return _checked(txt.strip(), "reward.txt")
    if as_json is None:
        return None, "tests/test.sh wrote neither /logs/verifier/reward.txt nor reward.json"
    try:
        content: Any = json.loads(as_json)
    except (ValueError, RecursionError):
        return 0.0, "reward.json is not JSON"
    if not isinstance(content, dict):
        return 0.0, "reward.json is not an object"
    if KEY not in content and len(content) != 1:
        return 0.0, f"reward.json has {len(content)} keys, and none is {KEY!r}"
    return _checked(content.get(KEY, next(iter(content.values()), None)), "reward.json")


def _checked(said: object, where: str) -> tuple[float, str]:
    """Accepts only numbers: not booleans and, in JSON, not strings."""
    if isinstance(said, bool) or not isinstance(said, int | float | str) or (isinstance(said, str) and where != "reward.txt"):
        return 0.0, f"{where} does not contain a number: {str(said)[:80]!r}"
    try:
        value = float(said)
    except (ValueError, OverflowError):
        return 0.0, f"{where} does not contain a number: {str(said)[:80]!r}"
    if not math.isfinite(value) or not 0 <= value <= 1:
        return 0.0, f"{where} contains {str(said)[:80]}, but a reward is from 0 to 1"
    return value, ""

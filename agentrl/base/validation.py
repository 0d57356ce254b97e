"""Error messages for values that do not validate."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import is_dataclass

from pydantic import ValidationError

from agentrl.base import secrets


def validation_text(error: ValidationError) -> str:
    """The errors of a validation, one line per key. Keys of a single section start with its class, as in `LearnerConfig.lr`."""
    lines = []
    for item in error.errors(include_url=False):
        path = [str(part) for part in item["loc"]]
        if error.title != "Recipe":
            path.insert(0, error.title)
        message = item["msg"].removeprefix("Value error, ")
        unknown = item["type"] in ("extra_forbidden", "unexpected_keyword_argument", "missing")
        shown = not unknown and not isinstance(item["input"], dict) and not is_dataclass(item["input"])
        if item["loc"] and shown and not any(secrets.literal_secret_errors({path[-1]: item["input"]})) and "env" not in path:
            message = f"{message} (got {shortened(item['input'])})"  # of a whole section the message names the keys
        lines.append(f"{'.'.join(path) or 'recipe'}: {message}")
    return "\n".join(lines)


def shortened(value: object) -> str:
    """A value for an error message, shortened and without secrets."""
    shown = secrets.HIDDEN if any(secrets.literal_secret_errors(value)) else repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def unknown_name(key: str, known: Iterable[str], *, what: str = "key") -> str:
    """The message for an unknown key, with similar and known keys."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=2, cutoff=0.7)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown {what}; {meant}known here: {', '.join(names)}"

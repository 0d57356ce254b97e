"""Error messages for values that do not validate."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass

from pydantic import ValidationError

from agentrl.base import secrets


def validation_text(error: ValidationError) -> str:
    """The errors of a validation, one line per key. Keys of a single section start with its class, as in `LearnerConfig.lr`."""
    lines = []
    for item in error.errors(include_url=False):
        path = [*([] if error.title == "Recipe" else [error.title]), *item["loc"]]
        message = item["msg"].removeprefix("Value error, ")
        unknown = item["type"] in ("extra_forbidden", "unexpected_keyword_argument", "missing")
        shown = not unknown and not isinstance(item["input"], dict) and not is_dataclass(item["input"])
        if item["loc"] and shown and not any(secrets.literal_secret_errors({str(path[-1]): item["input"]})) and "env" not in path:
            message = f"{message} (got {shortened(item['input'])})"  # of a whole section the message names the keys
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        lines.append(f"{where or 'recipe'}: {message}")
    return "\n".join(lines)


def shortened(value: object) -> str:
    """A value for an error message, shortened and without secrets."""
    shown = secrets.HIDDEN if any(secrets.literal_secret_errors(value)) else repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def unknown_name(key: str, known: Iterable[str], *, what: str = "key", elsewhere: Sequence[str] = ()) -> str:
    """The message for an unknown key, with similar and known keys. `elsewhere`: dotted keys of this name in sections below."""
    names = sorted(known)
    near = f"did you mean {' or '.join(elsewhere[:2])}? " if elsewhere else did_you_mean(key, names, "{}? ")
    return f"unknown {what}; {near}known here: {', '.join(names)}"


def did_you_mean(name: str, known: Iterable[str], form: str) -> str:
    """`did you mean NAME`, in `form`; empty if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    return form.format(f"did you mean {' or '.join(near)}") if near else ""

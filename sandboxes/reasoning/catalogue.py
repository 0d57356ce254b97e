"""Which of the package's datasets are in, and which are left out, by name and with the reason.

`docs/generate_reasoning_table.py` measures all of this again: that the gold answer scores 1, that nothing else does, that a problem is
the same in every process, and that a scorer stands anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentrl.errors import UserError

LEFT_OUT: Mapping[str, str] = {}

NUMBERS = r"[-+]?[0-9][0-9,]*(?:\.[0-9]*)?"

LANGUAGES: Mapping[str, re.Pattern[str]] = {
    "binary_matrix": re.compile(r"[01 \n\[\],]*"),
    "coin_flip": re.compile(rf"\s*{NUMBERS}\s*(?:/\s*[0-9]+\s*)?"),
    "countdown": re.compile(r"(?!.*\*\s*\*)[0-9+\-*/() ]*", re.DOTALL),
    "n_queens": re.compile(r"[Q_ \n]*"),
    "puzzle24": re.compile(r"(?!.*\*\s*\*)[0-9+\-*/() ]*", re.DOTALL),
    "spiral_matrix": re.compile(r"[0-9 \-\n]*"),
    "string_insertion": re.compile(r"[A-E]*"),
}
"""What an answer to these may be made of. Their scorers evaluate it as Python (or as a fraction with an exponent of any size), so anything
else is wrong without being asked about. What is left names nothing, calls nothing and raises to no power."""


def known(name: str) -> None:
    """Raises `UserError` for a dataset that is left out."""
    if reason := LEFT_OUT.get(name):
        raise UserError(f"reasoning-gym's {name} is left out: {reason}", fix="choose another; docs/reasoning.md has the list")


def speaks(name: str, answer: str) -> bool:
    """Whether an answer is in its dataset's language; any is where none is given."""
    language = LANGUAGES.get(name)
    return language is None or language.fullmatch(answer) is not None

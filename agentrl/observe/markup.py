"""The report's templates (Jinja2), in which whatever is printed is text.

What a sandbox printed is hostile input. Autoescaping keeps it from becoming a tag, an attribute or a script; and characters that a
person would not see, or that would turn the text around, are shown as their codes.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentrl.observe import formats

_KEPT = frozenset("\n\t")


def render(template: str, **values: Any) -> str:
    """A template of `agentrl/observe/templates` with these values. Raises `jinja2.UndefinedError` for a value that it lacks."""
    return environment().get_template(template).render(**values)


@cache
def environment() -> Environment:
    """The templates, ready to be used."""
    made = Environment(
        loader=PackageLoader("agentrl.observe"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"rate": formats.format_rate, "interval": formats.format_interval, "duration": formats.format_duration}
    return made


def visible(text: str) -> str:
    """The text with every invisible character as its code."""
    return text.translate(_VISIBLE)


def _shown(value: object) -> object:
    """What an expression in a template prints: markup (of a macro) as it is, and everything else as text."""
    return value if isinstance(value, Markup) else visible(str(value))


class _Visible(dict[int, str]):
    """How each character is written, found out when it is first met: controls, surrogates and bidirectional overrides as `\\xNN`."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        hidden = char not in _KEPT and unicodedata.category(char) in ("Cc", "Cf", "Cs")
        self[number] = char.encode("unicode_escape", "surrogatepass").decode("ascii") if hidden else char
        return self[number]


_VISIBLE = _Visible()

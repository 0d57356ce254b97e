"""Renders the templates of the report (Jinja2).

Text from sandboxes and models is hostile. Autoescaping prevents tags, attributes and scripts; invisible characters and those that change
the direction of text are shown as escapes.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentrl.observe.stats import format_duration, format_interval, format_rate

_UNCHANGED = frozenset("\n\t")


def render(template: str, **values: Any) -> str:
    """Renders a template of `agentrl/observe/templates`. Raises `jinja2.UndefinedError` for a missing value."""
    return environment().get_template(template).render(**values)


@cache
def environment() -> Environment:
    """The Jinja2 environment of the templates."""
    environment = Environment(
        loader=PackageLoader("agentrl.observe"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"rate": format_rate, "interval": format_interval, "duration": format_duration}
    return environment


def visible(text: str) -> str:
    """The text with escapes for invisible characters."""
    return text.translate(_VISIBLE)


def _shown(value: object) -> object:
    """The output of an expression in a template: markup of a macro unchanged, anything else as visible text."""
    return value if isinstance(value, Markup) else visible(str(value))


class _Visible(dict[int, str]):
    """Character -> its visible form, computed on first use: `\\xNN` for controls, surrogates and bidirectional overrides."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        hidden = char not in _UNCHANGED and unicodedata.category(char) in ("Cc", "Cf", "Cs")
        self[number] = char.encode("unicode_escape", "surrogatepass").decode("ascii") if hidden else char
        return self[number]


_VISIBLE = _Visible()

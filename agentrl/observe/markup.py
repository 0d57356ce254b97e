"""Renders the Jinja2 templates of the report. The templates share the components for charts and styles with the pages of `agentrl view`.

Text from sandboxes and models is untrusted. Autoescaping prevents such text from adding tags, attributes or scripts. Invisible characters
and characters that change the direction of text are shown as escapes.
"""

from __future__ import annotations

import re
import unicodedata
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentrl.observe.stats import format_duration, format_interval, format_rate

_UNCHANGED = frozenset("\n\t")
COMPONENTS = files("agentrl.observe") / "components"
"""Folder with the JavaScript modules and styles that `agentrl view` and the report share."""
_MODULES = ("visible.js", "dom.js", "format.js", "chart.js", "report.js")  # each module follows the modules that it imports
_LINKS = re.compile(r"^(?:import [^\n]*\n|export )", re.MULTILINE)


def render(template: str, **values: Any) -> str:
    """Renders a template in `agentrl/observe/templates` with these values. Raises `jinja2.UndefinedError` if a value is missing."""
    return environment().get_template(template).render(**values)


def template_file(name: str) -> bytes:
    """Returns the content of a file in `templates` or `components`, without rendering it."""
    path = files("agentrl.observe") / "templates" / name
    return (path if path.is_file() else COMPONENTS / name).read_bytes()


@cache
def script() -> str:
    """Returns one script that contains all JavaScript modules for drawing the charts of a page."""
    return "".join(_LINKS.sub("", (COMPONENTS / name).read_text(encoding="utf-8")) for name in _MODULES)


@cache
def environment() -> Environment:
    """Returns the Jinja2 environment of the templates."""
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
    environment.globals |= {
        "components": Markup((COMPONENTS / "components.css").read_text(encoding="utf-8")),
        "script": Markup(script()),
        "script_hash": b64encode(sha256(script().encode()).digest()).decode(),
    }
    return environment


def visible(text: str) -> str:
    """Returns the text with an escape sequence in place of each invisible character."""
    return text.translate(_VISIBLE)


def _shown(value: object) -> object:
    """Returns the value that a template shows for an expression: markup from a macro unchanged, any other value as `visible` text."""
    return value if isinstance(value, Markup) else visible(str(value))


class _Visible(dict[int, str]):
    """Maps a character to its visible form, computed on first use: `\\xNN` or `\\uNNNN` for controls, format characters and surrogates."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        hidden = char not in _UNCHANGED and unicodedata.category(char) in ("Cc", "Cf", "Cs")
        self[number] = char.encode("unicode_escape", "surrogatepass").decode("ascii") if hidden else char
        return self[number]


_VISIBLE = _Visible()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table in which each row starts with a name."""

    title: str  # header of the column with the names
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]  # name, cells
    more: str = ""  # note about rows that are not shown

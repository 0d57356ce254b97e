"""HTML and SVG that is escaped by construction: text becomes markup only through `element`.

What a sandbox printed is hostile input. A plain `str` handed to `element` is always text, so nothing in it can become a tag, an
attribute or a script; characters that a person would not see, or that would turn the text around, are shown as their codes.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable

_VOID = frozenset({"meta", "br"})
_KEPT = frozenset("\n\t")


class Html(str):
    """Finished markup. Made only by `element`, `join` and constants of this package."""

    __slots__ = ()


def element(tag: str, /, *children: Html | str | None, **attributes: str | int | float | None) -> Html:
    """`element("p", "a < b", class_="note")` -> `<p class="note">a &lt; b</p>`. None children and attributes are left out."""
    opening = "".join(f' {_attribute(key)}="{escape(str(value))}"' for key, value in attributes.items() if value is not None)
    if tag in _VOID:
        return Html(f"<{tag}{opening}>")
    return Html(f"<{tag}{opening}>{join(children)}</{tag}>")


def join(children: Iterable[Html | str | None]) -> Html:
    """Markup side by side; plain strings are escaped."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


def escape(text: str) -> Html:
    """Text as markup that shows exactly this text, invisible characters included."""
    return Html(text.translate(_SHOWN))


class _Shown(dict[int, str]):
    """How each character is written, found out when it is first met: controls, surrogates and bidirectional overrides as `\\xNN`."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        hidden = char not in _KEPT and unicodedata.category(char) in ("Cc", "Cf", "Cs")
        self[number] = char.encode("unicode_escape", "surrogatepass").decode("ascii") if hidden else html.escape(char, quote=True)
        return self[number]


_SHOWN = _Shown()


def _attribute(key: str) -> str:
    return key.removesuffix("_").replace("_", "-")

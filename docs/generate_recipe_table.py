"""Writes the table of recipe keys in `docs/recipes.md` from the field docstrings of the recipe's sections.

python docs/generate_recipe_table.py            # writes the table
python docs/generate_recipe_table.py --check    # exits with 1 if the page differs from the code
"""

from __future__ import annotations

import argparse
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.config import Recipe
from agentrl.config.section import Section, key_docs, listed_section_of, named_section_of, section_of
from agentrl.plugins.parts import Part, PartKind

PAGE = Path(__file__).resolve().parent / "recipes.md"
BEGIN = "<!-- table: written by docs/generate_recipe_table.py; do not edit -->"
END = "<!-- end of table -->"
LONG = 30  # characters shown of a default text
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def keys() -> Iterator[tuple[tuple[str, ...], tuple[FieldInfo, ...], str]]:
    """Yields dotted names, their fields and the meaning of every key. A key that several sections share is yielded once, with the name in
    each."""
    rows: dict[tuple[type, str], list[tuple[str, FieldInfo, str]]] = {}
    for section, name, dotted, docstring in _paths(Recipe, ""):
        *_, definer = (kind for kind in section.__mro__ if name in inspect.get_annotations(kind))  # others only change the default
        rows.setdefault((definer, name), []).append((dotted, section.model_fields[name], docstring))
    for row in rows.values():
        yield _places([dotted for dotted, _, _ in row]), tuple(field for _, field, _ in row), row[0][2]


def _paths(section: type[Section], prefix: str) -> Iterator[tuple[type[Section], str, str, str]]:
    """Yields section, name, dotted name and meaning of every key; nested sections follow."""
    nested, docstrings = [], key_docs(section)
    for name, field in section.model_fields.items():
        below = {f"{name}.": section_of(field.annotation), f"{name}.NAME.": named_section_of(field.annotation)}
        below[f"{name}[]."] = listed_section_of(field.annotation)
        if below[f"{name}."] is None or field.default is None:  # an optional section is a key too
            yield section, name, f"{prefix}{name}", docstrings.get(name, "")
        nested += [(inner, f"{prefix}{place}") for place, inner in below.items() if inner is not None]
    for inner, place in nested:
        yield from _paths(inner, place)


def _places(names: list[str]) -> tuple[str, ...]:
    """One or two names as they are; more are one, with `*` for what differs."""
    if len(names) <= 2:
        return tuple(names)
    parts = [name.split(".") for name in names]
    return (".".join([*_common(parts), "*", *reversed(_common([part[::-1] for part in parts]))]),)


def _common(parts: list[list[str]]) -> list[str]:
    """The items with which all lists start."""
    return [items[0] for items in takewhile(lambda items: len(set(items)) == 1, zip(*parts, strict=False))]


def table() -> str:
    """Returns a Markdown table with one row per key. Raises `SystemExit` for a field without a docstring."""
    rows = ["| key | default (type) | meaning |", "| --- | --- | --- |"]
    for names, fields, docstring in keys():
        if not docstring:
            raise SystemExit(f"{names[0]} has no docstring: write one line under the field")
        meaning = " ".join(docstring.split())
        kind = f" ({_cell(_type(fields[0]))})" if _type(fields[0]) else ""
        defaults = ", ".join(dict.fromkeys(map(_default, fields)))  # in the order of the names
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {defaults}{kind} | {_cell(meaning)} |")
    return "\n".join(rows)


def page_with_table(text: str) -> str:
    """Returns the page with the text between the two marks replaced by the table."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} lacks the two comments that mark the table")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _type(field: FieldInfo) -> str:
    """Returns type and bounds in short: `list of str`, `file, delta`, `int ≥1`; empty if the default shows the type."""
    bounds = [
        f"{sign}{_number(value)}" for item in field.metadata for name, sign in _BOUNDS if (value := getattr(item, name, None)) is not None
    ]
    kinds = [item for item in field.metadata if isinstance(item, PartKind)]
    name = _choices(kinds[0]) if kinds else _name(field.annotation)
    if name in ("bool", "int", "float", "str") and isinstance(field.default, int | float | str):
        name = ""
    return " ".join([name.removesuffix(", None") if field.default is None else name, ", ".join(bounds)]).strip()


def _choices(kind: PartKind) -> str:
    return ", ".join([*(f"`{name}`" for name in kind.shipped), "plug-in reference"])


def _name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated and (kinds := [item for item in arguments if isinstance(item, PartKind)]):
        return _choices(kinds[0])
    if origin is Annotated:
        return _name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{_literal(value)}`" for value in arguments)
    if origin is dict:
        return f"map to {_name(arguments[1])}"
    if origin is tuple:
        return f"list of {_name(arguments[0])}"
    if origin in (typing.Union, types.UnionType):
        return ", ".join("None" if part is type(None) else _name(part) for part in arguments)
    if annotation is Part:
        return "plug-in reference"
    return "section" if section_of(annotation) else str(getattr(annotation, "__name__", annotation))


def _literal(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, tuple):
        return ", ".join(f"`{item}`" for item in field.default) or "`()`"
    if field.default == "":
        return "empty"
    if isinstance(field.default, str) and len(field.default) > LONG:
        return f"`{field.default[:LONG]}...`"
    return f"`{_number(field.default)}`" if not isinstance(field.default, bool) else f"`{str(field.default).lower()}`"


def _number(value: object) -> str:
    """Returns the short form of a number: 0.0005, 600.0, 1e-06."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text}.0" if isinstance(value, float) and text.isdecimal() else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page is out of date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    wanted = page_with_table(text)
    if wanted == text:
        return 0
    if check:
        print("docs/recipes.md differs from the code: run python docs/generate_recipe_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

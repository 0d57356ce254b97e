"""Writes the table of recipe keys in `docs/recipes.md` from the field docstrings of the recipe's sections.

python docs/generate_recipe_table.py            # writes the table
python docs/generate_recipe_table.py --check    # exits with 1 if the page differs from the code
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.config import Recipe
from agentrl.config.section import Section, key_docs, named_section_of, section_of
from agentrl.plugins.parts import Part, PartKind

PAGE = Path(__file__).resolve().parent / "recipes.md"
BEGIN = "<!-- table: written by docs/generate_recipe_table.py; do not edit -->"
END = "<!-- end of table -->"
LONG = 30  # characters shown of a default text
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Yields dotted name, field and meaning of every key; nested sections follow. Sections of one type are listed once, under `*`."""
    nested, docstrings = [], key_docs(section)
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            nested.append((name, inner))
        if inner is None or field.default is None:  # an optional section is a key too
            yield f"{prefix}{name}", field, docstrings.get(name, "")
        if (several := named_section_of(field.annotation)) is not None:
            yield from keys(several, f"{prefix}{name}.NAME.")
    kinds = [inner for _, inner in nested]
    for index, (name, inner) in enumerate(nested):
        if inner not in kinds[:index]:
            yield from keys(inner, f"{prefix}{name if kinds.count(inner) == 1 else '*'}.")


def table() -> str:
    """Returns a Markdown table with one row per key. Raises `SystemExit` for a field without a docstring."""
    rows = ["| key | default (type) | meaning |", "| --- | --- | --- |"]
    for name, field, docstring in keys():
        if not docstring:
            raise SystemExit(f"{name} has no docstring: write one line under the field")
        meaning = " ".join(docstring.split())
        kind = f" ({_cell(_type(field))})" if _type(field) else ""
        rows.append(f"| `{name}` | {_default(field)}{kind} | {_cell(meaning)} |")
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

"""Writes the table of recipe keys in `docs/recipes.md` from the field docstrings of `agentrl/config/recipe.py`.

python docs/generate_recipe_table.py            # writes it
python docs/generate_recipe_table.py --check    # exits 1 when the page and the code disagree
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import JsonValue
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.config import Recipe
from agentrl.config.section import Section, key_docs, named_section_of, section_of
from agentrl.plugins.parts import PartKind

PAGE = Path(__file__).resolve().parent / "recipes.md"
BEGIN = "<!-- table: written by docs/generate_recipe_table.py; do not edit -->"
END = "<!-- end of table -->"
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Dotted name, field and meaning of every key, those of a section after those beside it; of sections that are alike once, under `*`."""
    nested, told = [], key_docs(section)
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            nested.append((name, inner))
        if inner is None or field.default is None:  # an optional section is a key too
            yield f"{prefix}{name}", field, told.get(name, "")
        if (several := named_section_of(field.annotation)) is not None:
            yield from keys(several, f"{prefix}{name}.NAME.")
    kinds = [inner for _, inner in nested]
    for place, (name, inner) in enumerate(nested):
        if inner not in kinds[:place]:
            yield from keys(inner, f"{prefix}{name if kinds.count(inner) == 1 else '*'}.")


def table() -> str:
    """Markdown: one row a key. Raises `SystemExit` naming a key whose field has no docstring."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field, told in keys():
        if not told:
            raise SystemExit(f"{name} has no docstring in agentrl/config/recipe.py: write one line under the field")
        meaning = " ".join(told.split())
        rows.append(f"| `{name}` | {_cell(_type(field))} | {_default(field)} | {_cell(meaning)} |")
    return "\n".join(rows)


def page_with_table(text: str) -> str:
    """A page with what stands between the two marks replaced by the table."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} lacks the marks of the table")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _type(field: FieldInfo) -> str:
    """The type as a reader needs it: `int ≥ 1`, `"file" or "nccl"`, `map of text to str, int, float, bool`."""
    bounds = [
        f"{sign} {_number(value)}" for item in field.metadata for name, sign in _BOUNDS if (value := getattr(item, name, None)) is not None
    ]
    patterns = [f"matching `{pattern}`" for item in field.metadata if (pattern := getattr(item, "pattern", None))]
    kinds = [item for item in field.metadata if isinstance(item, PartKind)]
    return " ".join([_words(kinds[0]) if kinds else _name(field.annotation), ", ".join([*bounds, *patterns])]).strip()


def _words(kind: PartKind) -> str:
    return f"{' or '.join(f'`{word}`' for word in kind.shipped)} or a reference"


def _name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated and (kinds := [item for item in arguments if isinstance(item, PartKind)]):
        return _words(kinds[0])
    if origin is Annotated:
        return _name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{_literal(value)}`" for value in arguments)
    if origin is dict:
        return f"map of {_name(arguments[0])} to {_name(arguments[1])}"
    if origin is tuple:
        return f"list of {_name(arguments[0])}"
    if origin in (typing.Union, types.UnionType):
        return ", ".join("nothing" if part is type(None) else _name(part) for part in arguments)
    return "JSON" if annotation is JsonValue else str(getattr(annotation, "__name__", annotation))


def _literal(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return f"`{_number(field.default)}`" if not isinstance(field.default, bool) else f"`{str(field.default).lower()}`"


def _number(value: object) -> str:
    """Numbers as a person writes them: 0.0005, 600, 1e-06 stay short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page is not up to date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    wanted = page_with_table(text)
    if wanted == text:
        return 0
    if check:
        print("docs/recipes.md does not match agentrl/config/recipe.py: run python docs/generate_recipe_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

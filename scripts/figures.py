"""Prints figures of the size and documentation of the code base, each next to its limit.

    python scripts/figures.py            the figures; exit code 1 if one exceeds its limit
    python scripts/figures.py --list     also lists every file, function and definition that exceeds a limit

The attack programs (agentrl/sandbox/attacks/programs) are data that run inside sandboxes and are not counted.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "agentrl"
PROGRAMS = PACKAGE / "sandbox" / "attacks" / "programs"
FILE_LINES = 450
FUNCTION_LINES = 50


@dataclass(frozen=True)
class Figure:
    """One figure, its limit, and what exceeds a limit of its own."""

    name: str
    value: int
    limit: int
    offenders: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the figure is within its limit."""
        return self.value <= self.limit


def sources() -> list[Path]:
    """The Python files of the package that count."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if PROGRAMS not in path.parents]


def line_count(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a module."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    doc = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None and first.end_lineno is not None else 0
    return (function.end_lineno or 0) - function.lineno + 1 - doc


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """The name of each public class, function and method, and whether it has a docstring. Overloads and setters do not count."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            if any(getattr(decorator, "id", getattr(decorator, "attr", "")) in ("overload", "setter") for decorator in node.decorator_list):
                continue
            yield f"{prefix}{node.name}", ast.get_docstring(node) is not None
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


def recipe_keys() -> list[str]:
    """The dotted names of all keys of a recipe. A key that several sections share counts once."""
    sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
    from generate_recipe_table import keys

    return [", ".join(names) for names, _, _ in keys()]


def figures() -> list[Figure]:
    """All figures."""
    paths = sources()
    lengths = {path: line_count(path) for path in paths}
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    name = {path: str(path.relative_to(ROOT)) for path in paths}
    long_files = [f"{name[path]}: {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES]
    sizes = [(length(function), f"{name[path]}:{function.lineno} {function.name}") for path in paths for function in functions(trees[path])]
    long_functions = [f"{where}: {size} lines" for size, where in sizes if size > FUNCTION_LINES]
    definitions = [(f"{name[path]}: {item}", documented) for path in paths for item, documented in public_definitions(trees[path].body)]
    undocumented = [item for item, documented in definitions if not documented]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md"))
    root = [path.stem for path in PACKAGE.glob("*.py")]
    test_lines = sum(map(line_count, (ROOT / "tests").rglob("*.py")))
    return [
        Figure("lines of agentrl/", sum(lengths.values()), 54_000),
        Figure("files of agentrl/", len(paths), 340),
        Figure("modules at the root of agentrl/", len(root), 3, tuple(root) if len(root) > 3 else ()),
        Figure("lines of the longest file", max(lengths.values()), FILE_LINES, tuple(long_files)),
        Figure("lines of the longest function", max(size for size, _ in sizes), FUNCTION_LINES, tuple(long_functions)),
        Figure(f"public definitions without a docstring, of {len(definitions):,}", len(undocumented), 0, tuple(undocumented)),
        Figure("keys of a recipe", len(recipe_keys()), 140),
        Figure("words in docs/", words, 55_000),
        Figure("lines of tests/", test_lines, 68_000),
    ]


def main() -> int:
    """Prints the table; 1 if a figure exceeds its limit."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("--list", action="store_true", help="also print what exceeds a limit")
    listed = parser.parse_args().list
    table = figures()
    for figure in table:
        print(f"{figure.value:8,}  at most {figure.limit:6,}  {'ok  ' if figure.ok else 'OVER'}  {figure.name}")
        if listed:
            print("".join(f"          {offender}\n" for offender in figure.offenders), end="")
    return 0 if all(figure.ok for figure in table) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Draws sentences that people read: docstrings, help texts, error messages and pages. For reviews of the language.

python scripts/sentences.py --seed 7 --count 40
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("agentrl", "rewards", "sandboxes", "recipes")
ERRORS = ("Error", "Fault", "Exception")


def python_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (location, text) of the docstrings, help texts and error messages of a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    location = path.relative_to(ROOT)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if doc := ast.get_docstring(node):
                yield f"{location}:{getattr(node, 'lineno', 1)} docstring", doc
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            texts = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg in ("help", "fix", "message"))]
            if called.endswith(ERRORS) or any(keyword.arg in ("help", "fix") for keyword in node.keywords):
                yield from ((f"{location}:{node.lineno} message", text) for text in map(literal, texts) if text)


def literal(node: ast.expr) -> str:
    """The text of a string or f-string, with `...` for its values; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    return ""


def page_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (location, text) of the paragraphs of a page, without code, tables and headings."""
    text = re.sub(r"(?s)```.*?```|<!--.*?-->", "", path.read_text(encoding="utf-8"))
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.lstrip().startswith(("#", "|", "<", "!")):
            yield f"{path.relative_to(ROOT)} page", paragraph


def sentences() -> list[tuple[str, str]]:
    """Returns (location, text) of all sentences of at least four words."""
    texts = [text for top in SOURCES for path in sorted((ROOT / top).rglob("*.py")) for text in python_texts(path)]
    texts += [text for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) for text in page_texts(path)]
    split = ((location, text.strip()) for location, text in texts for text in re.split(r"(?<=[.!?:])\s+(?=[A-Z`])|\n\s*[-*] |\n\n", text))
    return [(location, " ".join(text.split())) for location, text in split if len(text.split()) >= 4]


def main() -> None:
    """Prints the sample, numbered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    for number, (location, text) in enumerate(random.Random(options.seed).sample(sentences(), options.count), 1):
        print(f"{number:3}  {location}\n     {text}")


if __name__ == "__main__":
    main()

"""Every key of a recipe has an example: in a shipped recipe, a benchmark, an evaluation or the documentation."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Recipe
from agentrl.config.section import Section, listed_section_of, named_section_of, section_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("README.md", "docs", "recipes", "benchmarks", "evals", "rewards", "sandboxes", "agentrl/cli")
Key = tuple[type[Section], str]


def sections(kind: type[Section] = Recipe, path: str = "") -> Iterator[tuple[type[Section], str]]:
    """Every section with its path: `learner.lora.`, `judge_servers.NAME.`."""
    yield kind, path
    for name, field in kind.model_fields.items():
        if (inner := section_of(field.annotation)) is not None:
            yield from sections(inner, f"{path}{name}.")
        elif (inner := named_section_of(field.annotation)) is not None:
            yield from sections(inner, f"{path}{name}.NAME.")
        elif (inner := listed_section_of(field.annotation)) is not None:
            yield from sections(inner, f"{path}{name}[].")


def defining_key(kind: type[Section], name: str) -> Key:
    """Returns a key with the section class that defines it, which several sections may inherit."""
    *_, definer = (base for base in kind.__mro__ if name in inspect.get_annotations(base))
    return definer, name


def keys() -> dict[Key, str]:
    """Every key with its dotted name. Sections that share a key count once."""
    names: dict[Key, str] = {}
    for kind, path in sections():
        for name, field in kind.model_fields.items():
            if section_of(field.annotation) is None or field.default is None:
                names.setdefault(defining_key(kind, name), f"{path}{name}")
    return names


CLASSES = {kind.__name__: kind for kind, _ in sections()}


def assigned_keys(kind: type[Section], path: str, value: Any = None) -> Iterator[Key]:
    """Yields the keys that `path=value` sets in a section: `rollout.group={"size": 4}` sets `rollout.group.size`."""
    name, _, rest = path.partition(".")
    if (field := kind.model_fields.get(name)) is None:
        return
    yield defining_key(kind, name)
    named = named_section_of(field.annotation)
    inner = named or section_of(field.annotation)
    values = [value]
    if named is not None:
        section_name, _, rest = rest.partition(".")
        values = [value] if section_name else list(value.values()) if isinstance(value, dict) else []
    if inner is None and (inner := listed_section_of(field.annotation)) is not None:
        values = value if isinstance(value, list) else []
    if inner is None:
        return
    for item in values:
        for key, content in {rest: item}.items() if rest else item.items() if isinstance(item, dict) else ():
            yield from assigned_keys(inner, key, content)


def keys_in_text(text: str) -> Iterator[Key]:
    """Yields keys of overrides as on the command line, with or without a JSON value."""
    for match in re.finditer(r"(?<![\w.])([a-z_]+(?:\.[\w/-]+)*)=([{\[].*[}\]](?='))?", text):
        value = None
        with contextlib.suppress(ValueError):
            value = json.loads(match[2] or "null")
        yield from assigned_keys(Recipe, match[1], value)


def literal(node: ast.expr) -> Any:
    """Returns a literal dictionary or list, or None for other expressions."""
    if isinstance(node, ast.List):
        return [literal(item) for item in node.elts]
    if not isinstance(node, ast.Dict):
        return None
    return {key.value: literal(value) for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)}


def keys_in_python(source: str) -> Iterator[Key]:
    """Yields keys in arguments of sections, `but(steps=1)`, mappings of dotted keys, and overrides in texts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            kind = Recipe if name == "but" else CLASSES.get(name)
            for keyword in node.keywords if kind is not None else ():
                yield from assigned_keys(kind or Recipe, keyword.arg or "", literal(keyword.value))
        elif isinstance(node, ast.Dict):
            for key, value in (literal(node) or {}).items():
                yield from assigned_keys(Recipe, str(key), value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from keys_in_text(node.value)


def keys_in_page(text: str) -> Iterator[Key]:
    """Yields keys in examples, overrides, and settings in backticks, such as `kl="k3"`, of sections that the page constructs."""
    text = re.sub(r"(?s)<!-- table.*?<!-- end of table -->", "", text)
    for block in re.findall(r"(?ms)^```python\n(.*?)^```$", text):
        with contextlib.suppress(SyntaxError):
            yield from keys_in_python(block)
    yield from keys_in_text(text)
    constructed = [kind for name, kind in CLASSES.items() if f"{name}(" in text]
    for name in re.findall(r"`(\w+)=[^`]+`", text):
        yield from (defining_key(kind, name) for kind in constructed if name in kind.model_fields)


@cache
def set_keys() -> frozenset[Key]:
    keys_set: set[Key] = set()
    for source in SOURCES:
        path = ROOT / source
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.name.endswith((".py", ".py.in")):
                keys_set.update(keys_in_python(file.read_text()))
            elif file.suffix == ".md":
                keys_set.update(keys_in_page(file.read_text()))
    return frozenset(keys_set)


@pytest.mark.slow
def test_every_key_is_set_by_a_recipe_a_benchmark_an_evaluation_or_an_example() -> None:
    unset = {name for key, name in keys().items() if key not in set_keys()}
    assert not unset, (
        "no recipe, benchmark, evaluation or example sets these keys. Show each in an example of docs/, or replace it by a named constant"
        f" next to the code that reads it: {', '.join(sorted(unset))}"
    )


def test_settings_are_recognized() -> None:
    """A mentioned key does not count as set."""
    names = keys()
    code = 'base.but({"rollout.delegation": {"depth": 2}}, steps=3)\nLearnerConfig(lr=1)\nx = "judge_servers.a.threads=2"'
    page = '`memory.notes` is read; `agentrl train r.py \'gate={"suite": "s"}\'`'
    recognized = {names[key] for key in (*keys_in_python(code), *keys_in_page(page)) if key in names}
    assert recognized == {
        "rollout.delegation",
        "rollout.delegation.depth",
        "steps",
        "learner.lr",
        "judge_servers",
        "serving.threads",  # both sections share the key
    } | {
        "gate",
        "gate.suite",
    }

"""Rules for imports: one direction, no content in agentrl, and no heavy package at import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agentrl"
LONGEST_FILE = 600

LOW = frozenset({"errors", "base", "records", "protocols", "plugins", "config"})
RUN = frozenset({"evaluation", "gate", "session", "run"})
"""Rooms that use a whole run. They may import each other, and every room below."""
BELOW_RUN = frozenset(
    {"task", "agent", "environment", "rollout", "gateway", "sandbox", "reward", "judge", "memory", "experience", "objective", "version"}
) | {
    *("serving", "failure", "observe", "learner", "supervised", "model", "cluster"),
}

# The rooms (folders or modules of agentrl) that each room may import, in addition to itself. Imports point one way: no cycle.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "base": frozenset({"errors"}),
    "records": frozenset(),
    "protocols": frozenset({"records"}),
    "plugins": frozenset({"errors", "base"}),
    "config": frozenset({"errors", "base", "records", "plugins"}),
    "experience": LOW,
    "objective": LOW,
    "version": LOW,
    "observe": LOW,
    "testing": LOW,
    "gateway": LOW,
    "task": LOW | {"experience"},
    "failure": LOW | {"task"},
    "agent": LOW | {"task", "environment", "gateway"},
    "environment": LOW | {"task", "gateway"},
    "rollout": LOW | {"task", "environment"},
    "reward": LOW | {"task"},
    "sandbox": LOW | {"task", "gateway"},  # the attacks try the gateway from inside a sandbox
    "cluster": LOW | {"gateway", "sandbox"},  # the port of cells
    "serving": LOW | {"version", "cluster"},
    "memory": LOW | {"agent", "experience", "rollout", "task"},
    "judge": LOW | {"reward", "failure", "environment"},
    "learner": LOW | {"experience", "objective", "version", "serving", "cluster", "gateway"},
    "supervised": LOW | {"objective", "judge"},
    "model": LOW | {"agent", "learner", "version"},
    **dict.fromkeys(RUN, LOW | BELOW_RUN | RUN),
    "watch": LOW | {"experience", "observe"},
    "check": LOW | BELOW_RUN | RUN,
    "chaos": LOW | BELOW_RUN | RUN,
    "view": LOW | BELOW_RUN | RUN,
    "cli": LOW | BELOW_RUN | RUN | {"chaos", "check", "testing", "view", "watch"},
    "__main__": frozenset({"cli"}),
}
FACE = "__init__"  # agentrl/__init__.py: may import the rooms of LOW
CONTENT = ("sandboxes", "rewards", "recipes", "evals", "benchmarks", "tests")
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "trl", "datasets")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def imports_and_calls(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """Import and call nodes of a file. tests/base/test_unpickled.py also uses them, on the same worker."""
    walked = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in walked if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Dotted names of the modules that a file imports, anywhere in it; `from agentrl import x` gives `agentrl.x`."""
    names: list[str] = []
    for node in imports_and_calls(path):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; use the absolute name"
            module = node.module or ""
            names += [f"{module}.{name.name}" for name in node.names] if module == "agentrl" else [module]
    return tuple(names)


def rooms_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imported(path))
    rooms = {parts[1] for parts in names if parts[0] == "agentrl" and len(parts) > 1}
    return {room for room in rooms if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()}


def test_imports_point_one_way() -> None:
    wrong = [f"{path.relative_to(PACKAGE)}: {message}" for path in sources("agentrl") for message in forbidden_imports(path)]
    assert not wrong, "\n".join(wrong)


def forbidden_imports(path: Path) -> Iterator[str]:
    """Error messages for the imports that the room of a file must not have."""
    room = room_of(path)
    allowed = LOW if room == FACE else MAY_IMPORT[room]
    yield from (f"{room} imports {other}" for other in sorted(rooms_imported(path) - {room} - allowed))


def test_the_table_of_rooms_is_complete_and_acyclic() -> None:
    rooms = {room_of(path) for path in sources("agentrl")} - {FACE}
    assert rooms == set(MAY_IMPORT)
    remaining = dict(MAY_IMPORT)
    while ready := [room for room, needs in remaining.items() if not (needs - RUN if room in RUN else needs) & set(remaining)]:
        for room in ready:
            del remaining[room]
    assert not remaining, f"a cycle among {sorted(remaining)}"


def test_agentrl_never_imports_content() -> None:
    violations = {str(path): name for path in sources("agentrl") for name in imported(path) if name.split(".")[0] in CONTENT}
    assert not violations, "content is resolved by agentrl.plugins alone"


def test_records_need_only_the_standard_library_and_pydantic() -> None:
    for path in sources("agentrl/records"):
        packages = {module.split(".")[0] for module in imported(path)} - {"agentrl", "pydantic", "pydantic_core"}
        assert packages <= sys.stdlib_module_names, path


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources("agentrl", *CONTENT)}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


LOADING = f"""
import json, sys
from pathlib import Path
import agentrl, agentrl.cli, agentrl.cli.doctor
from agentrl.cli.running import load_recipe
from agentrl.config import Recipe

def loaded():
    return {{name.split(".")[0] for name in sys.modules}} & set({HEAVY!r})

known, newly_loaded = loaded(), {{}}
newly_loaded["agentrl"] = sorted(known)
for path in map(Path, sys.argv[1:]):
    if "\\nrecipe = " in path.read_text():
        assert isinstance(load_recipe(path, [])[1], Recipe)
    newly_loaded[path.name], known = sorted(loaded() - known), loaded()
print(json.dumps(newly_loaded))
"""


@pytest.mark.slow
def test_loading_a_recipe_imports_no_heavy_package() -> None:
    recipes = sources("recipes")
    completed = subprocess.run([sys.executable, "-c", LOADING, *map(str, recipes)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout) == {name: [] for name in ("agentrl", *(recipe.name for recipe in recipes))}

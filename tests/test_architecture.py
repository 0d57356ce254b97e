"""The plan of the house, enforced: imports point one way, siblings are strangers, content stays outside, heavy things stay asleep."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agentrl"
LONGEST_FILE = 600

# A room (a folder or module of agentrl) may import rooms of its own and lower levels; at level SIBLINGS only lower ones.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "records",
            "sampling",
            "fields",
            "errors",
            "destinations",
            "files",
            "foreign",
            "limits",
            "memo",
            "processes",
            "estimates",
            "lag",
            "liveness",
            "scores",
            "secret_forms",
            "secrets",
        }
    ),
    frozenset(
        {"protocols", "learning", "listening", "installation", "codec", "database", "toml", "usercode", "causes", "outages", "runlock"}
    ),
    frozenset({"section", "sections", "gating", "recipe", "plugins", "fulfils", "parts", "contract", "weights"}),
    frozenset(
        {
            "task",
            "sandbox",
            "agent",
            "rollout",
            "gateway",
            "serving",
            "reward",
            "experience",
            "memory",
            "objective",
            "version",
            "failure",
            "compare",
            "observe",
            "testing",
        }
    ),
    frozenset({"learner", "supervised", "model", "practice"}),
    frozenset({"run", "cluster"}),
    frozenset({"prove"}),
    frozenset({"cli", "__main__"}),
)
SIBLINGS = 3  # the level whose rooms do not know each other
FACE = "__init__"  # agentrl/__init__.py: may import the light levels
CONTENT = ("sandboxes", "rewards", "recipes", "evals", "benchmarks", "tests")
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "trl", "datasets")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def level(room: str) -> int:
    for number, rooms in enumerate(LEVELS):
        if room in rooms:
            return number
    raise AssertionError(f"agentrl/{room} is in no level of this test: say where it belongs, here and in docs/design.md")


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Dotted names of the modules that a file imports, anywhere in it; `from agentrl import x` gives `agentrl.x`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            module = node.module or ""
            found += [f"{module}.{name.name}" for name in node.names] if module == "agentrl" else [module]
    return tuple(found)


def rooms_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imported(path))
    rooms = {parts[1] for parts in names if parts[0] == "agentrl" and len(parts) > 1}
    return {room for room in rooms if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()}


def test_imports_point_one_way() -> None:
    """In one test: one for each of hundreds of files costs more seconds than they."""
    wrong = [f"{path.relative_to(PACKAGE)}: {said}" for path in sources("agentrl") for said in upward_imports(path)]
    assert not wrong, "\n".join(wrong)


def upward_imports(path: Path) -> Iterator[str]:
    """What is wrong with the imports of a file."""
    room = room_of(path)
    if room == FACE:
        yield from (f"the face imports {other}" for other in rooms_imported(path) if level(other) >= SIBLINGS)
        return
    for other in rooms_imported(path) - {room}:
        if level(other) > level(room):
            yield f"{room} imports {other}, which stands above it"
        elif level(other) == level(room) == SIBLINGS:
            yield f"{room} imports its sibling {other}; records and protocols are what they share"


def test_agentrl_never_imports_content() -> None:
    guilty = {str(path): name for path in sources("agentrl") for name in imported(path) if name.split(".")[0] in CONTENT}
    assert not guilty, "content is resolved by agentrl.plugins alone"


def test_the_lowest_modules_need_only_the_standard_library() -> None:
    for name in LEVELS[0]:
        packages = {module.split(".")[0] for module in imported(PACKAGE / f"{name}.py")} - {"agentrl"}
        assert packages <= sys.stdlib_module_names


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources("agentrl", *CONTENT)}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


LOADING = f"""
import json, sys
from pathlib import Path
import agentrl, agentrl.cli, agentrl.cli.doctor
from agentrl.cli.recipes import load_recipe
from agentrl.recipe import Recipe

def awake():
    return {{name.split(".")[0] for name in sys.modules}} & set({HEAVY!r})

known, woken = awake(), {{}}
woken["agentrl"] = sorted(known)
for path in map(Path, sys.argv[1:]):
    if "\\nrecipe = " in path.read_text():
        assert isinstance(load_recipe(path, [])[1], Recipe)
    woken[path.name], known = sorted(awake() - known), awake()
print(json.dumps(woken))
"""


def test_loading_a_recipe_wakes_nothing_heavy() -> None:
    recipes = sources("recipes")
    done = subprocess.run([sys.executable, "-c", LOADING, *map(str, recipes)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: [] for name in ("agentrl", *(recipe.name for recipe in recipes))}

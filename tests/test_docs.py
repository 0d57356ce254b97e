"""The documentation is correct: names, links and keys exist, and its examples run unchanged."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.forms.json_calls import read_hermes
from agentrl.cli import COMMANDS
from agentrl.cli.project import init_project
from agentrl.config import Recipe
from agentrl.config.section import named_section_of, section_of
from agentrl.evaluation.policies import find_policy, load_policy_plugin
from agentrl.failure.triage import load_rules
from agentrl.judge.failure_judge import load_failure_judge
from agentrl.testing.chat_server import ChatServer, ScriptedAnswer
from tests.failure import traces

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
SOURCE_FOLDERS = ("agentrl", "docs", "recipes", "rewards", "sandboxes", "benchmarks", "tests", "scripts", "requirements")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@dataclass(frozen=True)
class Block:
    """A fenced block; `path` is the path in its first line, as in `# rewards/close.py`."""

    language: str
    text: str
    path: str | None


def blocks(page: Path) -> list[Block]:
    matches = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language, text, match[1] if (match := re.match(r"# ([\w./-]+\.\w+)\n", text)) else None) for language, text in matches]


def example_files() -> set[str]:
    """Files that the examples create, which the text may mention."""
    return {block.path for page in PAGES for block in blocks(page) if block.path}


def prose(page: Path) -> str:
    """The page without comments."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


def write_examples(page: str, project: Path) -> list[str]:
    """Writes every block with a path into a project and returns the paths of its tests."""
    example_blocks = [block for block in blocks(ROOT / "docs" / page) if block.path]
    for block in example_blocks:
        assert block.path is not None
        target = project / block.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.text)
    return [block.path for block in example_blocks if block.path and block.path.startswith("tests/")]


def run(project: Path, *arguments: str, timeout: float = 600) -> str:
    """Returns the output of `python ARGUMENTS` in a project. Fails if the exit code is not 0."""
    completed = subprocess.run([sys.executable, *arguments], cwd=project, text=True, capture_output=True, timeout=timeout, check=False)
    assert completed.returncode == 0, f"{arguments}\n{completed.stdout}{completed.stderr}"
    return completed.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What `agentrl init` writes."""
    init_project(tmp_path / "mine", "mine")
    return tmp_path / "mine"


@cache
def _tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


def defines(module: Path, names: list[str]) -> bool:
    """Whether a source file defines `names` (a class and its member, inherited in the file or not), or imports the first of them."""
    top: list[ast.stmt] = _tree(module).body
    body = top
    for name in names:
        statement = next((node for node in body if name in _bound(node)), None)
        if statement is None:
            return False
        body = _members(statement, top) if isinstance(statement, ast.ClassDef) else []
    return True


def _members(node: ast.ClassDef, module: list[ast.stmt]) -> list[ast.stmt]:
    """The body of a class, and those of its bases in the same file."""
    names = {base.id for base in node.bases if isinstance(base, ast.Name)}
    bases = [other for other in module if isinstance(other, ast.ClassDef) and other.name in names]
    return [*node.body, *(member for base in bases for member in _members(base, module))]


def _bound(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name
        case ast.Assign(targets=[ast.Name() as target]) | ast.AnnAssign(target=ast.Name() as target):
            yield target.id
        case ast.If():  # imports for type checkers, which are lazy at run time
            yield from (name for child in node.body for name in _bound(child))
        case ast.ImportFrom():
            yield from (alias.asname or alias.name for alias in node.names)


def resolves(dotted: str) -> bool:
    """Whether `agentrl.a.b.Name.member` names a module of the source, or something defined in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:cut])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file():
            return defines(module, parts[cut:])
    return False


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    paths = re.findall(rf"(?<![\w./-])((?:{'|'.join(SOURCE_FOLDERS)})/[\w./-]*\w/?)", prose(page))
    known = example_files()
    known |= {str(parent) for path in known for parent in Path(path).parents}
    missing = {path for path in paths if not (ROOT / path).exists() and path.rstrip("/") not in known}
    assert not {path for path in missing if path != "recipes/mine.py"}, missing


@pages
def test_names_of_the_package_exist(page: Path) -> None:
    dotted = re.findall(r"\bagentrl(?:\.[A-Za-z_]\w*)+", prose(page))
    assert not {name for name in dotted if not resolves(name) and name != "agentrl.plugins"}


@pages
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


@cache
def commands() -> set[str]:
    return {name for group in COMMANDS.values() for name in group}


@pages
def test_commands_and_targets_exist(page: Path) -> None:
    text = prose(page)
    assert set(re.findall(r"(?:^|`|&& |/)agentrl ([a-z]+)(?![\w-])", text, re.MULTILINE)) <= commands()
    makefiles = (ROOT / "Makefile", ROOT / "agentrl" / "cli" / "template" / "Makefile.in")
    targets = {target for file in makefiles for target in re.findall(r"^([a-z0-9-]+):", file.read_text(), re.MULTILINE)}
    assert set(re.findall(r"(?:^|`|&& )make ([a-z0-9-]+)\b", text, re.MULTILINE)) <= targets


@pages
def test_recipe_keys_exist(page: Path) -> None:
    sections = {name: field.annotation for name, field in Recipe.model_fields.items()}
    for section, key, inner in re.findall(rf"`({'|'.join(sections)})\.(?!jsonl?`)(\w+)(?:\.(\w+))?(?:=[^`]*)?`", prose(page)):
        if (named_section := named_section_of(sections[section])) is not None:  # `tools.NAME.calls`
            assert not inner or inner in named_section.model_fields, f"{section}.{key}.{inner}"
            continue
        kind = section_of(sections[section])
        assert kind is not None and key in kind.model_fields, f"{section}.{key}"


@pages
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{page.name}:{block.path}", "exec")


@pytest.mark.slow
def test_the_table_of_recipe_keys_is_up_to_date() -> None:
    run(ROOT, "docs/generate_recipe_table.py", "--check")


@pytest.mark.slow
def test_the_recipe_example_loads(project: Path) -> None:
    write_examples("recipes.md", project)
    assert run(project, "-c", "from recipes.mine import recipe; print(recipe.steps, recipe.learner.lr)").split() == ["24", "0.0003"]
    program = "from recipes.longer import base, recipe; print(recipe.learner.lora.rank, recipe.steps, recipe.but(name='mine') == base)"
    assert run(project, "-c", program).split() == ["4", "60", "False"]


def test_the_triage_rule_example_tags_answers_in_another_unit(project: Path) -> None:
    write_examples("failures.md", project)
    (rule,) = load_rules([f"{project}/triage/units.py:wrong_unit"])[:1]
    first_turn = traces.turn(traces.python("print(412)", "412"))
    tags = [rule(traces.trace(first_turn, traces.turn(traces.submit(text)), answer=text)) for text in ("412000", "0.412", "421", "", "x")]
    assert [tag and (tag.name, tag.turn) for tag in tags] == [("wrong_unit", 1), ("wrong_unit", 1), None, None, None]


def test_the_failure_judge_example_loads(project: Path) -> None:
    write_examples("failures.md", project)
    judge = load_failure_judge(f"{project}/triage/reader.py:reader")
    assert "- wrong_unit: the answer is the truth in another unit" in judge._instructions() and judge.budget.calls == 2_000


def test_the_policy_example_answers_the_cases_of_a_suite(project: Path) -> None:
    write_examples("failures.md", project)
    policy = load_policy_plugin(find_policy(f"{project}/policies/sure.py:policy"))
    reading = read_hermes(policy.script(0, "any episode"), ())
    assert [(call.name, call.arguments) for call in reading.calls] == [("submit", {"answer": "97"})] and not reading.errors


@pytest.mark.slow
@pytest.mark.bubblewrap
def test_a_failure_becomes_a_case_that_guards_ci_in_a_new_project(project: Path) -> None:
    """What docs/failures.md says under "A case that guards CI", with the policy of that page: promoted, evaluated, run in pytest."""
    write_examples("failures.md", project)
    program = """
from pathlib import Path
from agentrl.failure.case import Case, save_case
from agentrl.records import Split
from sandboxes.tables import Tables
save_case(Path("evals/first"), Case(id="one", task=Tables(seed=5).task(Split.HELDOUT, 2)))
"""
    run(project, "-c", program)

    def evaluate(suite: str, folder: str) -> subprocess.CompletedProcess[str]:
        command = ["-m", "agentrl", "eval", suite, "--policy", "policies.sure:policy", "--sandbox", "bubblewrap", "--run-dir", folder]
        return subprocess.run([sys.executable, *command], cwd=project, text=True, capture_output=True, timeout=600, check=False)

    assert evaluate("evals/first", "runs/r").returncode == 1
    options = ("--into", "evals/reading", "--repeats", "2", "--threshold", "0.75", "--note", "ticket 812")
    assert "1 new case in evals/reading" in run(project, "-m", "agentrl", "failures", "promote", "runs/r", "--most", "1", *options)
    rerun = evaluate("evals/reading", "runs/again")
    assert rerun.returncode == 1 and "0.00 of 0.75 in 2 attempts" in rerun.stdout and "note      ticket 812" in rerun.stdout, rerun
    extra = ["--agentrl-suite", "evals/reading", "--agentrl-policy", "policies.sure:policy", "--agentrl-set", "sandbox.backend=bubblewrap"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", *extra]
    result = subprocess.run(command, cwd=project, text=True, capture_output=True, timeout=600, check=False)
    assert result.returncode == 1 and "1 failed" in result.stdout and "ticket 812" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_the_gate_example_loads(project: Path) -> None:
    write_examples("gate.md", project)
    program = "from recipes.held import recipe; print(recipe.gate.suite, recipe.gate.every, recipe.gate.action)"
    assert run(project, "-c", program).split() == ["evals/pricing", "4", "rollback"]


@pytest.mark.slow
def test_the_verifier_example_works_in_a_new_project(project: Path) -> None:
    tests = write_examples("verifiers.md", project)
    assert "9 passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    program = """
from pathlib import Path
from agentrl.cli.check import open_target
from agentrl.cli.running import load_recipe
from agentrl.records import Split
from agentrl.session.preflight import open_tasks
root, recipe = load_recipe(Path("recipes/close.py"), [])
family, scorer = open_tasks(recipe, root=root)
print(*(one.task(split, 3).verifiers for one in (family, open_target("recipes/close.py", None)[0].open()) for split in Split))
"""
    assert run(project, "-c", program).split() == ["('rewards.close:close_number',)"] * 6, "by train, eval and check, in every split"
    scoring = """
import asyncio
from agentrl.records import Episode, Message, SandboxSpec, Split, Task
from rewards.mine import total
prompt, sandbox = (Message(role="user", content="How far is it?"),), SandboxSpec(image="sandboxes/tables")
fields = dict(tools=("submit",), sandbox=sandbox, verifiers=("rewards.mine:total",), data={"answer": "1200 m"}, split=Split.TRAIN)
task = Task(id="t", family="demo", prompt=prompt, **fields)
for answer in ("1.2 km", "1200", "1200 m", "1200 kg", "1 km", ":", None):
    episode = Episode(id="e", task_id=task.id, task_key=task.key, trajectories=(), answer=answer)
    print(asyncio.run(total(task, episode)).value)
"""
    assert run(project, "-c", scoring).split() == ["1.0"] * 3 + ["0.0"] * 4, "the rubric"


@pytest.mark.slow
@pytest.mark.bubblewrap
def test_the_verifier_example_is_proven_in_real_sandboxes(project: Path) -> None:
    write_examples("verifiers.md", project)
    output = run(project, "-m", "agentrl", "check", "recipes/close.py", "--count", "12", "--sandbox", "bubblewrap", timeout=1500)
    assert "1 verifier: " in output and "FAIL" not in output, output


@pytest.mark.slow
def test_the_judge_examples_work_in_a_new_project(project: Path) -> None:
    tests = write_examples("judges.md", project)
    assert "1 passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    program = "from rewards.panel import panel; from rewards.polite import judge; print(bool(panel.identity), judge.form.criteria[0].high)"
    assert run(project, "-c", program).split() == ["True", "4"]
    loading = "import sys; from pathlib import Path; from agentrl.reward import TaskScorer; TaskScorer().load(['rewards.trusted:correct'])"
    with pytest.raises(AssertionError, match=r"no calibration calibrations/correct\.json"):
        run(project, "-c", loading)


@pytest.mark.slow
def test_the_family_example_works_in_a_new_project(project: Path, tmp_path: Path) -> None:
    tests = write_examples("task-families.md", project)
    assert "3 passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    imports = "from agentrl.records import Split; from sandboxes.logs import Logs; t = Logs().task(Split.HELDOUT, 3)"
    truth = run(project, "-c", f"{imports}; open({str(tmp_path / 'app.log')!r}, 'w').write(t.files['app.log']); print(t.data['answer'])")
    program = run(project, "-c", f"{imports}; print(Logs().gold(t))")
    assert run(tmp_path, "-c", program).strip() == truth.strip()


@pytest.mark.slow
def test_the_outside_agent_example_runs_and_its_recipe_is_valid(project: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "python", "arguments": '{"code": "print(1 + 2)"}'}}
    tool_call_response = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}
    contents: list[str] = []

    def answer(body: Mapping[str, Any], number: int) -> ScriptedAnswer:
        contents.append(body["messages"][-1]["content"])
        return ScriptedAnswer(f"it is {contents[-1]}") if number else ScriptedAnswer(raw=json.dumps(tool_call_response).encode())

    with ChatServer(answer) as server:
        env = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "k", "AGENTRL_MODEL": "policy"}
        program = [sys.executable, "-I", "recipes/agents/tables_stdlib.py"]
        result = subprocess.run(program, cwd=project, env=env, input="What is 1 + 2?", text=True, capture_output=True, timeout=60)
    assert (result.stdout, contents) == ("it is 3\n", ["What is 1 + 2?", "3"]), result.stderr
    check = "from agentrl.cli.running import load_recipe; from agentrl.session.preflight import check_parts; from pathlib import Path\n"
    check += "check_parts(load_recipe(Path('recipes/outside_agent.py'), [])[1])\n"
    run(project, "-c", check)


@pytest.mark.slow
def test_the_plugin_examples_implement_their_protocols_and_work(project: Path) -> None:
    write_examples("parts.md", project)
    program = """
import os, tempfile
from pathlib import Path
from agentrl.cli.running import load_recipe
from agentrl.experience import open_store
from agentrl.objective.advantages import load_estimator
from agentrl.observe import open_trackers
from agentrl.rollout import excluded_group
from agentrl.records import Blame, Failure
from agentrl.session.preflight import check_parts, _try_objective

_, recipe = load_recipe(Path("recipes/own_parts.py"), [])
check_parts(recipe)
_try_objective(recipe)
print(load_estimator(recipe.objective)([[1.0, 0.0, 0.5]]))
with tempfile.TemporaryDirectory() as folder:
    recipe = recipe.but({"store.options.disk": folder})
    store = open_store(Path("run"), recipe)
    store.put(excluded_group(3, "t", "k", Failure(stage="s", blame=Blame.TASK, kind="k", message="m"), size=1))
    store.close()
    print(os.listdir(folder)[0], [entry.index for entry in open_store(Path("run"), recipe).entries()])
    tracker = open_trackers(Path(folder), recipe, console=False)[-1]
    tracker.log(1, {"loss": 0.5})
    tracker.stage("train")
    tracker.close()
    print(Path(folder, "figures.csv").read_text())
"""
    lines = run(project, "-c", program).splitlines()
    assert lines[:2] == ["[[1.0, -2.0, -1.0]]", "run.sqlite [3]"] and lines[2] == "1,,0.5"
    lengths = {block.path: len(block.text.splitlines()) for block in blocks(ROOT / "docs" / "parts.md") if block.path}
    assert lengths["parts/advantage.py"] <= 15, "an estimator needs at most 15 lines in one file"


@pytest.mark.bubblewrap
@pytest.mark.slow
def test_the_backend_example_is_checked_against_the_protocol(project: Path) -> None:
    write_examples("parts.md", project)
    command = ("-m", "agentrl", "sandbox", "check", "--backend", "parts.backend:Announced", "--only", "exec_result")
    assert " ok " in run(project, *command, timeout=1500)


@pytest.mark.slow
@pytest.mark.bubblewrap
def test_the_family_example_is_proven_in_real_sandboxes(project: Path) -> None:
    write_examples("task-families.md", project)
    output = run(project, "-m", "agentrl", "check", "recipes/logs.py", "--count", "4", "--sandbox", "bubblewrap", timeout=1500)
    assert "ok    every gold solution scores 1" in output and "FAIL" not in output


def test_no_message_refers_to_docs_which_a_project_does_not_have() -> None:
    """Neither a project created by `agentrl init` nor an installed wheel has docs/. Docstrings may refer to it."""
    references = {}
    for path in sorted((ROOT / "agentrl").rglob("*.py")):
        if "docs/" not in (source := path.read_text(encoding="utf-8")):
            continue
        nodes = list(ast.walk(ast.parse(source)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # including those of fields
        texts = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings)
        references |= {f"{path.relative_to(ROOT)}:{node.lineno}": node.value for node in texts if re.search(r"\bdocs/", node.value)}
    assert references == {}


@pytest.mark.deepspeed
def test_the_page_names_every_file_of_the_traced_walk() -> None:
    """The command exits with 1 if a walk exceeds its limit; here only the page and the examples' lengths are checked."""
    command = (sys.executable, "docs/walk.py")
    completed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600, check=False)
    counts = re.findall(r"^(.+): (\d+) (files|lines) \(at most (\d+)(?:, OVER)?\)$", completed.stdout, re.MULTILINE)
    assert len(counts) == 5, completed.stdout + completed.stderr
    traced = re.findall(r"^  (agentrl/[\w/]+\.py): \S+(.*)$", completed.stdout, re.MULTILINE)
    assert len(traced) == sum(int(count) for _, count, unit, _ in counts if unit == "files") > 20
    assert [path for path, remark in traced if remark] == []
    assert "does not exist" not in completed.stdout
    assert [name for name, count, unit, limit in counts if unit == "lines" and not 3 <= int(count) <= int(limit)] == []

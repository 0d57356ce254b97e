"""A suite may only use code and images of its project."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.base import untrusted_files
from agentrl.cli import app
from agentrl.errors import UserError
from agentrl.evaluation.suite_code import check_project, check_suite_code
from agentrl.failure.case import Case, Suite
from agentrl.plugins.parts import Part
from agentrl.records import EnvironmentSpec, Limits, Message, SandboxSpec, Split, Task
from tests.evaluation.suite_parts import HERE, OVERRIDES, make_case, make_suite

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef v(task, episode): return 1.0\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    (root / "evals" / "theirs").mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    for folder in (tmp_path, root, root / "evals" / "theirs"):
        (folder / "evil.py").write_text(EVIL)
    monkeypatch.chdir(root)
    return root


def suite_of(project: Path, case: Case) -> Suite:
    return make_suite(project / "evals" / "theirs", case)


def a_case(*, image: str = "none", **changes: Any) -> Case:
    case = make_case("a")
    return replace(case, task=replace(case.task, sandbox=SandboxSpec(image=image), **changes))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("{outside}/evil.py:v", "outside the project"),
        ("../evil.py:v", "outside the project"),
        ("evals/theirs/../../../evil.py:v", "outside the project"),
        ("link.py:v", "outside the project"),
        ("evals/theirs/evil.py:v", "code in the suite's folder"),
        ("evals.theirs.evil:v", "code in the suite's folder"),
        ("evals.theirs:v", "code in the suite's folder"),
        ("evil\0.py:v", "not a path"),
        ("evil\n.py:v", "not a path"),
        (f"{'x' * 300}.py:v", "not a path"),
        (f"{'x/' * 3000}x.py:v", "not a path"),
        ("evil\0:v", "not a module"),
        ("evil\n:v", "not a module"),
        (".:v", "not a module"),
        ("..evil:v", "not a module"),
        ("a-b/evil:v", "not a module"),
    ],
)
@pytest.mark.parametrize("kind", ["verifiers", "tools"])
def test_foreign_code_raises_before_it_is_imported(kind: str, reference: str, why: str, project: Path, tmp_path: Path) -> None:
    (project / "link.py").symlink_to(tmp_path / "evil.py")
    foreign = suite_of(project, a_case(**{kind: (reference.format(outside=tmp_path),)}))
    with pytest.raises(UserError, match=why):
        check_suite_code(foreign, project)
    arguments = ["eval", "evals/theirs", *OVERRIDES, "--policy", f"{HERE}:policy", "--run-dir", "r"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError) and why in str(result.exception), result.output
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("reference", ["evil:v", "package.part:v", "package.evil.part:v"])
@pytest.mark.parametrize("entry", ["", "{suite}"])
def test_code_found_in_the_current_directory_raises(reference: str, entry: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `python -m agentrl eval .` in the suite's folder."""
    suite = project / "evals" / "theirs"
    (project / "evil.py").unlink()
    (suite / "package").mkdir()
    (suite / "package" / "__init__.py").write_text(EVIL)
    monkeypatch.chdir(suite)
    monkeypatch.syspath_prepend(entry.format(suite=suite))
    with pytest.raises(UserError, match="code in the suite's folder"):
        check_suite_code(suite_of(project, a_case(verifiers=(reference,))), project)


def test_the_project_precedes_the_current_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "evals" / "theirs")
    monkeypatch.syspath_prepend("")
    check_suite_code(suite_of(project, a_case(verifiers=("evil:v", "json:loads", "agentrl.records:Score"))), project)


THEIRS, INSPECT, DIALOGUE = "./evals/theirs/evil.py:v", "inspect:rewards/mine.py@t", "agentrl.environment.dialogue:Dialogues"
FIELDS: dict[str, tuple[Any, bool]] = {  # field -> a value that refers to code or an image, and whether the case must be rejected
    "id": (THEIRS, False),
    "family": (THEIRS, False),  # a case is evaluated without its family
    "prompt": ((Message(role="user", content=THEIRS),), False),
    "tools": ((THEIRS,), True),
    "sandbox": (SandboxSpec(image="../image"), True),
    "verifiers": ((THEIRS,), True),
    "data": ({"answer": THEIRS}, False),  # truth; for `data.inspect` see below
    "split": (Split.TRAIN, False),
    "files": ({"evil.py": THEIRS}, False),  # in the sandbox
    "binary_files": ({"evil.py": "eA=="}, False),
    "outputs": (("evals/theirs/evil.py",), False),
    "limits": (Limits(), False),
    "environment": (EnvironmentSpec(ref=THEIRS), True),
}
SPEC_FIELDS: dict[str, tuple[Any, bool]] = {
    "ref": (THEIRS, True),
    "options": ({"user": THEIRS}, True),
    "seed": (7, False),
    "context_turns": (7, False),
    "resume": ("restart", False),
    "pass_threshold": (0.5, False),
}
SANDBOX_FIELDS: dict[str, tuple[Any, bool]] = {
    "image": ("../image", True),
    **dict.fromkeys(("memory_mb", "processes", "cpus", "disk_mb", "open_files"), (7, False)),
    "runtime": ("evals/theirs/evil.py", False),  # Docker accepts only the names of runtimes
    "network": (("pypi.org:443",), False),  # an address, not a program
}


@pytest.mark.parametrize(("record", "cases"), [(Task, FIELDS), (EnvironmentSpec, SPEC_FIELDS), (SandboxSpec, SANDBOX_FIELDS)])
def test_every_field_of_a_task_is_checked_or_refers_to_no_code(record: type, cases: dict[str, tuple[Any, bool]], project: Path) -> None:
    assert {field.name for field in fields(record)} == set(cases), "decide whether check_suite_code must check the new field"
    for name, (value, rejected) in cases.items():
        task = replace(make_case("a").task, environment=EnvironmentSpec(ref=DIALOGUE))
        inner = {EnvironmentSpec: task.environment, SandboxSpec: task.sandbox}.get(record)
        key = "environment" if record is EnvironmentSpec else "sandbox"
        changed = replace(task, **({name: value} if inner is None else {key: replace(inner, **{name: value})}))
        suite = Suite(folder=project / "evals" / "theirs", name="s", cases=(Case(id="a", task=changed),))
        if rejected:
            with pytest.raises(UserError, match=r"code in the suite's folder|outside the project"):
                check_suite_code(suite, project)
        else:
            check_suite_code(suite, project)


def test_a_suite_sends_a_secret_only_where_the_recipe_sends_it(project: Path) -> None:
    """A third-party suite names a server and the variable that it wants."""
    server, mine = "nemo-gym:http://127.0.0.1:9", {"key": "env:MINE"}
    for environment, data in (
        (EnvironmentSpec(ref=server, options=mine), {}),
        (EnvironmentSpec(ref=server, options={"headers": [{"x": "file:/etc/shadow"}]}), {}),
        (None, {"inspect": {"ref": server, "options": mine}}),
    ):
        suite = suite_of(project, a_case(environment=environment, data=data))
        for family in (None, Part("nemo-gym:http://127.0.0.1:8", mine), Part(server, {"key": "env:OTHER"})):
            with pytest.raises(UserError, match=r"would give the secret (env:MINE|file:/etc/shadow) to 'nemo-gym:http://127.0.0.1:9'"):
                check_suite_code(suite, project, family=family)
    check_suite_code(suite, project, family=Part(server, mine))


@pytest.mark.parametrize(
    ("ref", "options", "why"),
    [
        ("../evil.py:Env", {}, "outside the project"),
        ("evals.theirs.evil:Env", {}, "suite's folder"),
        ("a-b/evil:Env", {}, "not a module"),
        ("gymnasium:evals.theirs.evil:Env-v0", {}, "suite's folder"),
        ("inspect:evals/theirs/evil.py@t", {}, "suite's folder"),
        ("inspect:../evil.py@t", {}, "outside the project"),
        ("inspect:evals.theirs.evil@t", {}, "suite's folder"),
        ("verifiers:evals/theirs", {}, "suite's folder"),
        ("verifiers:Evals.Theirs.evil", {}, "suite's folder"),
        (INSPECT, {"solver": "evals.theirs.evil@s"}, "suite's folder"),
        (INSPECT, {"variables": {"PYTHONPATH": "evals/theirs"}}, "suite's folder"),
        (INSPECT, {"variables": {"LD_PRELOAD": "x.so ./evals/theirs/x.so"}}, "suite's folder"),
        (INSPECT, {"variables": {"PYTHONWARNINGS": "error::evals.theirs.evil.W"}}, "suite's folder"),
        (INSPECT, {"environment": "../evals/theirs/venv"}, "suite's folder"),
        (DIALOGUE, {"user": "policy", "backend": "evals.theirs.evil:B"}, "suite's folder"),
        (DIALOGUE, {"user": "../evil.py:u"}, "outside the project"),
        (DIALOGUE, {"user": "evals/theirs/ev\nil.py:u"}, "suite's folder"),
        ("gymnasium:CartPole-v1", {"formatter": ["./evals/theirs/evil.py:f"]}, "suite's folder"),
    ],
)
@pytest.mark.parametrize("scored", [False, True])
def test_an_environment_of_foreign_code_raises(ref: str, options: dict[str, Any], why: str, scored: bool, project: Path) -> None:
    """With `scored`, the shipped verifier `agentrl.environment.inspect_tasks:score_ended` opens the environment in the task's data."""
    spec = {"environment": EnvironmentSpec(ref=ref, options=options)}
    if scored and not ref.startswith("inspect:"):
        return
    case = a_case(**({"data": {"inspect": {"ref": ref, "options": options}}} if scored else spec))
    with pytest.raises(UserError, match=why):
        check_suite_code(suite_of(project, case), project)


@pytest.mark.parametrize(
    ("ref", "options"),
    [
        ("gymnasium:CartPole-v1", {"action_names": ["left", "right"]}),
        ("openenv:http://localhost:8000/x", {"reset": {"task": "a/b.py"}}),
        ("nemo-gym:http://localhost:8000", {"row": {"input": "evals/theirs: see http://x.org/a.py, ../evil.py and /testbed/a.py."}}),
        ("rewards.mine:Game", {"path": "/data/levels.json", "prompt": "Correct /testbed/django/core.py, as in https://x.org/a.py"}),
        ("inspect:rewards/mine.py@t", {"solver": "rewards.mine@s", "model_roles": {"grader": "openai/gpt-5"}, "variables": {"K": "K"}}),
        ("verifiers:reverse-text", {"environment": "verifiers"}),
        (
            DIALOGUE,
            {"user": "rewards.mine:user", "brief": "You: a user. Say 4/5!\nEdit evil.py, ./x.py or theirs.", "opening": "a / . .. b"},
        ),
    ],
)
def test_an_environment_of_the_project_is_allowed(
    ref: str, options: dict[str, Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = suite_of(project, a_case(environment=EnvironmentSpec(ref=ref, options=options)))
    check_suite_code(suite, project)
    spaced = replace(suite, folder=project / "evals" / "the irs")
    if ref.startswith(("nemo-gym:", "openenv:")):  # the options of a server refer to no code here
        check_suite_code(spaced, project)
        return
    with pytest.raises(UserError, match="a separator or white space"):
        check_suite_code(spaced, project)
    check_suite_code(replace(spaced, cases=(make_case("a"),)), project)


def test_an_option_found_in_the_current_directory_raises(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suite_of(project, a_case(environment=EnvironmentSpec(ref=DIALOGUE, options={"user": "evil:u"})))
    check_suite_code(suite, project)
    monkeypatch.chdir(suite.folder)
    with pytest.raises(UserError, match="code in the suite's folder"):
        check_suite_code(suite, project)


def test_the_name_of_a_suite_without_code_may_be_a_word_in_the_options(project: Path) -> None:
    """The word is not a path, although the folder of the suite is in the root of the project."""
    options = {"user": "rewards.mine:user", "brief": "Ask about pricing. Pricing, or pricing: which?", "opening": "pricing"}
    suite = make_suite(project / "pricing", a_case(environment=EnvironmentSpec(ref=DIALOGUE, options=options)))
    (suite.folder / "README.md").write_text("cases about prices")
    check_suite_code(suite, project)
    for name in ("__init__.py", "cases/evil.so", "sitecustomize.py", "README.md.py"):
        (suite.folder / name).write_text(EVIL)
        with pytest.raises(UserError, match=r"refers to '[Pp]ricing[.,]?', which is the suite's folder, and the folder contains"):
            check_suite_code(suite, project)
        (suite.folder / name).unlink()
    (project / "linked").mkdir()
    (project / "linked" / "evil.py").write_text(EVIL)
    (suite.folder / "code.md").symlink_to("../linked")
    with pytest.raises(UserError, match="contains files other than cases"):
        check_suite_code(suite, project)
    (suite.folder / "code.md").unlink()
    named = a_case(environment=EnvironmentSpec(ref=DIALOGUE, options={"user": "pricing.evil:u"}))
    with pytest.raises(UserError, match="code in the suite's folder"):
        check_suite_code(make_suite(suite.folder, named), project)


FOREIGN = ("/etc", "../image", "sandboxes/../../image")
IMPOSSIBLE = ("a\0b", "a\x1b[31m", "a\n", "\x7f", "x" * 256, "é" * 128, "x/" * 2100 + "x")


@pytest.mark.parametrize("image", [*FOREIGN, *IMPOSSIBLE])
def test_a_foreign_image_or_an_impossible_folder_name_raises(image: str, project: Path) -> None:
    with pytest.raises(UserError, match="an image outside" if image in FOREIGN else "name is not a path"):
        check_suite_code(suite_of(project, a_case(image=image)), project)


def test_surrogates_are_not_a_path(project: Path) -> None:
    assert untrusted_files.resolve_inside("a\ud800b", project) is None and untrusted_files.resolve_inside("\udcff", project) is None
    assert untrusted_files.resolve_inside("x" * 255, project) == project / ("x" * 255)


def test_code_of_the_project_and_its_packages_is_allowed(project: Path) -> None:
    names = ("rewards.tables:exact_answer", "rewards/mine.py:exact", f"{project}/rewards/mine.py:exact", "an_entry_point")
    check_suite_code(suite_of(project, a_case(image="sandboxes/tables", verifiers=names, tools=("python", "submit", "mcp:files"))), project)


def test_a_suite_of_another_project_is_evaluated_in_it(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "download"
    other.mkdir()
    (other / "pyproject.toml").write_text("")
    suite = make_suite(other / "evals", make_case("a"))
    with pytest.raises(UserError, match="belongs to a different project") as error:
        check_project([suite], other)
    assert f"cd {other}" in error.value.fix
    result = CliRunner().invoke(app, ["eval", str(other / "evals"), *OVERRIDES, "--policy", f"{HERE}:policy", "--run-dir", "r"])
    assert isinstance(result.exception, UserError) and "a different project" in str(result.exception)
    monkeypatch.chdir(other / "evals")
    check_project([suite], other)

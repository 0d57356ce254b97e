"""`agentrl eval RECIPE --policy module:attr`: a recipe's tasks, tools and verifiers, evaluated without a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config import EvalConfig, PolicyConfig, Recipe, TasksConfig
from agentrl.errors import UserError
from agentrl.evaluation import results
from agentrl.evaluation.open_policy import held_out_suite
from tests.evaluation.suite_parts import OVERRIDES

RECIPE = """
from agentrl.config import EvalConfig, PolicyConfig, Recipe, TasksConfig
recipe = Recipe(
    name="own",
    policy=PolicyConfig(model="nowhere/at-all", max_model_len=2048),
    tasks=TasksConfig(family="./own_family.py:Own"),
    evaluation=EvalConfig(heldout=4, heldout_real=1),
)
"""
FAMILY = """
from agentrl.agent import TaskData, tool
from agentrl.records import Limits, Message, SandboxSpec, Score, Split, Task

@tool
async def colour_of(task: TaskData) -> str:
    'Give the colour.'
    return task.data["colour"]

async def verdict(task, episode):
    return Score(value=float(episode.answer == "pass"))

class Own:
    name = "own"
    def __init__(self, seed=0): pass
    def size(self, split): return None
    def task(self, split, index):
        return Task(id=f"{split}/{index} ?", family="own", prompt=(Message(role="user", content=f"case good {split} {index}"),),
                    tools=("./own_family.py:colour_of", "submit"), sandbox=SandboxSpec(image="none"),
                    verifiers=("./own_family.py:verdict",), data={"colour": "blue", "index": index}, split=split,
                    limits=Limits(turns=4, turn_tokens=300, episode_tokens=2000))
    def gold(self, task): return "print(1)"
"""
POLICY = """
from agentrl.testing import ScriptedPolicy, byte_tokenizer

def call(name, arguments):
    return '<tool_call>{"name": "%s", "arguments": %s}</tool_call>' % (name, arguments)

def policy() -> ScriptedPolicy:
    turns = [call("colour_of", "{}"), call("submit", '{"answer": "pass"}')]
    return ScriptedPolicy(byte_tokenizer(), lambda turn, episode: turns[turn])

def wrong() -> ScriptedPolicy:
    return ScriptedPolicy(byte_tokenizer(), lambda turn, episode: call("submit", '{"answer": "fail"}'))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    for name, text in (("own.py", RECIPE), ("own_family.py", FAMILY), ("own_policy.py", POLICY)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_eval(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, ["eval", "own.py", *OVERRIDES, *arguments])
    return result.exit_code, result.stdout, result.exception


def test_a_scripted_policy_is_evaluated_on_a_recipes_tasks(project: Path) -> None:
    code, output, error = run_eval("--policy", "./own_policy.py:policy", "evaluation.heldout=3", "--run-dir", "r", "--json")
    assert code == 0, (output, error)
    report = json.loads(output.splitlines()[-1])
    assert [case["case"] for case in report["cases"]] == ["heldout-0000", "heldout-0001", "heldout-0002", "heldout_real-0000"]
    assert report["suites"][0]["figures"]["pass_at_1"] == 1.0 and report["passed"]
    stored = results.load_results(project / "r" / "suite")
    assert (stored.about.suite, stored.about.recipe, stored.about.cases) == ("own", "own", 4)
    assert "blue" in (project / "r" / "suite" / "episodes.jsonl").read_text(), "a tool of the family was called with its task"


def test_a_split_with_few_tasks_contributes_all_of_them(project: Path) -> None:
    few = FAMILY.replace("return None", 'return {"heldout": 1, "heldout_real": 0}.get(split, 9)').replace('"own"', '"few"')
    (project / "few_family.py").write_text(few.replace("return Task(", "assert index < self.size(split)\n        return Task("))
    recipe = Recipe(
        name="few",
        policy=PolicyConfig(model="nowhere/at-all"),
        tasks=TasksConfig(family="./few_family.py:Own"),
        evaluation=EvalConfig(heldout=2, heldout_real=1),
    )
    assert [case.id for case in held_out_suite(recipe, project).cases] == ["heldout-0000"]
    with pytest.raises(UserError, match="no held-out tasks"):
        held_out_suite(recipe.but({"evaluation.heldout": 0}), project)


def test_a_failed_case_is_a_result_and_not_an_error(project: Path) -> None:
    code, output, error = run_eval("--policy", "./own_policy.py:wrong", "--run-dir", "r")
    assert code == 0 and "0 of 5 cases passed, 5 failed" in output, (output, error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "./own_policy.py:policy", "--pin"], "cannot be combined with the recipe"),
        (["--policy", "./own_policy.py:policy", "evaluation.heldout=0", "evaluation.heldout_real=0"], "no held-out task"),
        (["--policy", "./own_policy.py:nothing"], "nothing"),
    ],
)
def test_invalid_arguments_are_reported(arguments: list[str], message: str, project: Path) -> None:
    code, output, error = run_eval(*arguments)
    assert code != 0 and isinstance(error, UserError) and message in str(error), (output, error)


def test_policy_and_model_options_serve_the_same_model(project: Path) -> None:
    (project / "m").mkdir()
    (project / "m" / "config.json").write_text("{}")
    (_, _, first), (_, _, second) = (run_eval(option, "m") for option in ("--policy", "--model"))
    assert isinstance(first, UserError) and str(first) == str(second) and f"{project / 'm'}" in str(first)


URL = ("--policy", "http://127.0.0.1:9/v1", "--model", "m")
PLUGIN = ("--policy", "./own_policy.py:policy")


@pytest.mark.parametrize(
    ("ref", "policy", "message"),
    [
        ("inspect:mine.py@task", URL, r"inspect:mine.*gets only.*\n  fix: .*--model FOLDER, or set tasks.family.options.solver=agentrl"),
        ("verifiers:mine", URL, r"verifiers:mine.*gets only.*\n  fix: .*--model FOLDER$"),
        ("gymnasium:CartPole-v1", URL, "gymnasium:CartPole-v1.*gets only"),
        ("verifiers:mine", PLUGIN, "the program of 'verifiers:mine' drives the model, so turns cannot run it"),
    ],
)
def test_an_environment_that_the_policy_cannot_play_is_an_error(ref: str, policy: tuple[str, ...], message: str, project: Path) -> None:
    with_environment = FAMILY.replace("split=split,", f"split=split, environment=EnvironmentSpec(ref={ref!r}),")
    (project / "own_family.py").write_text(with_environment.replace("import Limits", "import EnvironmentSpec, Limits"))
    code, output, error = run_eval(*policy)
    assert code != 0 and isinstance(error, UserError) and re.search(message, str(error)), (output, error)

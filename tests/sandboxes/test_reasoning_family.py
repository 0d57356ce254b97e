"""The reasoning family: pure tasks, disjoint splits, programs that print the answers, and invalid options."""

from __future__ import annotations

import ast
import contextlib
import decimal
import inspect
import io
import subprocess
import sys
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.protocols import TaskFamily
from agentrl.records import Message, Split, Task
from sandboxes.reasoning import Reasoning, catalogue, problems
from sandboxes.reasoning.mixture import Source
from sandboxes.reasoning.problems import digest, is_heldout
from sandboxes.reasoning.worked import PROGRAMS, program

ROOT = Path(__file__).resolve().parents[2]
SEVERAL = {"datasets": "chain_sum, gcd:2, spell_backward@0, tower_of_hanoi(max_disks=4)", "heldout_kinds": "lcm, simple_geometry"}
EVALUATED = {"eval", "exec", "compile", "__import__", "import_module", "parse_expr", "sympify", "system", "Popen"}
HARMLESS = {
    "basic_arithmetic": "evaluates its own formula when it makes a problem",
    "bf": "compiles its own program when it makes a problem",
    "bitwise_arithmetic": "evaluates its own formula, and reads the answer as a number",
    "number_sorting": "evaluates its own answer; the model's is read as JSON",
}
"""Datasets whose module evaluates text that no model wrote. Review them when the version of the package changes."""


@cache
def family(**options: str) -> TaskFamily:
    return Reasoning(seed=3, **options)  # type: ignore[arg-type]


def tasks(split: Split, count: int) -> list[Task]:
    return [family(**SEVERAL).task(split, index) for index in range(count)]


def printed(program: str) -> str:
    """Returns the output of a program of this package."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, "<program>", "exec"), {})
    return out.getvalue().rstrip("\n")


@pytest.mark.models
def test_a_task_is_a_pure_function_of_seed_split_and_index() -> None:
    for split in Split:
        keys = [family(**SEVERAL).task(split, index).key for index in (0, 7, 5000)]
        assert [Reasoning(seed=3, **SEVERAL).task(split, index).key for index in (5000, 7, 0)] == keys[::-1]
        assert Reasoning(seed=4, **SEVERAL).task(split, 7).key != keys[1]


@pytest.mark.models
def test_splits_share_no_question_and_no_example_is_a_question() -> None:
    """Tower of Hanoi has few questions, so many seeds give the same ones."""
    train, heldout, unseen = (tasks(split, 600) for split in Split)
    questions = [{digest(task.prompt[-1].content) for task in split_tasks} for split_tasks in (train, heldout, unseen)]
    assert not questions[0] & questions[1] and not questions[0] & questions[2]
    repeated = [task for task in train if task.data["kind"] == "tower_of_hanoi"]
    assert len({task.prompt[-1].content for task in repeated}) < len(repeated), "otherwise this proves nothing"
    examples = {digest(message.content) for task in (*train, *heldout, *unseen) for message in task.prompt[:-1] if message.role == "user"}
    assert examples and not examples & (questions[0] | questions[1])
    assert not any(map(is_heldout, {message.content for task in train for message in task.prompt if message.role == "user"}))


@pytest.mark.models
def test_heldout_kinds_have_a_separate_split() -> None:
    assert {task.data["kind"] for task in tasks(Split.HELDOUT_REAL, 20)} == {"lcm", "simple_geometry"}
    assert {task.data["kind"] for split in (Split.TRAIN, Split.HELDOUT) for task in tasks(split, 20)} == {
        *("chain_sum", "gcd", "spell_backward", "tower_of_hanoi")
    }
    assert Reasoning().size(Split.HELDOUT_REAL) == 0 and family(**SEVERAL).size(Split.HELDOUT_REAL) is None


@pytest.mark.slow
def test_variants_are_training_problems_of_the_same_dataset_and_neighbouring_levels() -> None:
    several = Reasoning(seed=3, datasets="chain_sum, spell_backward@1", heldout_kinds="lcm")
    allowed = {("alike", None), ("alike", 1), ("harder", 2), ("easier", 0)}
    for index, relations in ((0, {"alike"}), (1, {"alike", "harder", "easier"})):
        heldout = several.task(Split.HELDOUT, index)
        variants = list(islice(several.variants(heldout, seed=0), 12))
        assert variants == list(islice(several.variants(heldout, seed=0), 12)) and {relation for relation, _ in variants} == relations
        assert {(task.data["kind"], task.split) for _, task in variants} == {(heldout.data["kind"], Split.TRAIN)}
        assert not any(is_heldout(task.prompt[-1].content) for _, task in variants)
        assert {(relation, task.data["origin"]["level"]) for relation, task in variants} <= allowed
    assert list(several.variants(several.task(Split.HELDOUT_REAL, 0), seed=0)) == [], "kinds that are never trained have no practice"


@pytest.mark.models
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("level", [None, 0, 3])
def test_a_program_prints_exactly_the_answer(kind: str, level: int | None) -> None:
    for index in range(60):
        problem = problems.entry(Source(name=kind, level=level), 0, index)
        assert printed(PROGRAMS[kind](problem["question"])) == problem["answer"], problem["question"]


@pytest.mark.models
def test_a_problem_does_not_depend_on_earlier_problems() -> None:
    """One generator of the package sets the precision of decimal numbers for the process, to 6 digits by default."""
    long, other = Source(name="decimal_chain_sum", level=3), Source(name="decimal_arithmetic")
    before = [problems.entry(long, 0, index)["answer"] for index in range(20)]
    for index in range(5):
        problems.entry(other, 0, index)
    assert [problems.entry(long, 0, index)["answer"] for index in range(20)] == before
    assert decimal.getcontext().prec == 28


@pytest.mark.models
def test_a_prompt_begins_with_solved_problems() -> None:
    roles = [message.role for message in family(datasets="chain_sum").task(Split.TRAIN, 0).prompt]
    assert roles == ["system", *("user", "assistant", "tool", "assistant") * 2, "user"]
    with_tool, without = (family(datasets="chain_sum, maze", tool=tool) for tool in ("python", "none"))
    for index in (0, 1):
        solved, plain = with_tool.task(Split.TRAIN, index), without.task(Split.TRAIN, index)
        for start in (1, 5):
            question, call, output, answer = solved.prompt[start : start + 4]
            program = str(call.tool_calls[0].arguments["code"])
            assert printed(program) == output.content == answer.tool_calls[0].arguments["answer"]
            assert question in plain.prompt and Message(role="assistant", content=output.content) in plain.prompt
        assert solved.tools == ("python", "submit") and plain.tools == () and "tool" not in {message.role for message in plain.prompt}
        assert solved.prompt[-1] == plain.prompt[-1], "the problems are the same with the tool and without"
    kinds = [family(datasets="chain_sum, maze").task(Split.TRAIN, index).prompt[1].content for index in (0, 1)]
    assert "arithmetic problem" in kinds[0] and "multiplication" in kinds[1], "a maze has no program, so other kinds are shown"
    assert len(Reasoning(examples=0).task(Split.TRAIN, 0).prompt) == 2  # type: ignore[arg-type]


@pytest.mark.models
def test_unparsable_question_has_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another version of the package had other questions."""
    assert program("lcm", "Which is the smallest number that 4 and 6 divide?") is None and program("maze", "?") is None
    pattern = PROGRAMS["lcm"]
    monkeypatch.setitem(PROGRAMS, "lcm", lambda question: pattern(question.replace("numbers", "these")))  # type: ignore[index]
    others = Reasoning(datasets="lcm")
    task = others.task(Split.TRAIN, 0)
    assert "multiplication" in task.prompt[1].content and others.gold(task) == f"print({task.data['answer']!r})"


@pytest.mark.models
def test_the_truth_stays_on_the_host() -> None:
    for task in tasks(Split.HELDOUT, 8):
        assert not task.files and set(task.data) == {"kind", "answer", "origin"}
        assert task.limits.tool_output_chars >= 2 * len(task.data["answer"]), "the complete gold answer is shown"


@pytest.mark.models
@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        ({"datasets": "chain_sums"}, "no dataset 'chain_sums'", "chain_sum"),
        ({"datasets": ""}, "is empty", "chain_sum"),
        ({"datasets": "polynomial_multiplication"}, "evaluates the answer", "use a different dataset"),
        ({"datasets": "basic_arithmetic(allow_parentheses=false)"}, "from left to right", "remove allow_parentheses"),
        ({"datasets": "chain_sum(max_term=3)"}, "no key 'max_term'", "max_terms"),
        ({"datasets": "chain_sum(min_terms=9 max_terms=3)"}, "rejects", "max_terms"),
        ({"datasets": 'basic_arithmetic(operators=["/"])'}, "generated no problem with operators=['/']: IndexError", "change its keys"),
        ({"datasets": "chain_sum(seed=3)"}, "no key 'seed'", "max_terms"),
        ({"datasets": "chain_sum@99"}, "highest level is", "chain_sum@0"),
        ({"datasets": "gsm_symbolic@0"}, "no levels", "key=value"),
        ({"heldout_kinds": "gcd"}, "both contain gcd", "remove it from one of them"),
        ({"tool": "shell"}, "tool is 'shell'", "python or none"),
        ({"examples": 9}, "examples is 9", "0 to 8"),
    ],
)
def test_invalid_options_raise_with_a_fix(options: dict[str, object], message: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        Reasoning(**options)  # type: ignore[arg-type]
    assert message in str(error.value) and fix in str(error.value.fix)


@pytest.mark.models
def test_no_included_dataset_evaluates_model_output() -> None:
    """Reads the source of each module, because a new version of the package may start to evaluate answers."""
    from sandboxes.reasoning import package

    evaluating = set()
    for name in set(package.names()) - set(catalogue.LEFT_OUT):
        tree = ast.parse(inspect.getsource(inspect.getmodule(package.dataset_class(name))))  # type: ignore[arg-type]
        called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
        names = {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in called}
        if names & EVALUATED or "pickle" in ast.unparse(tree):
            evaluating.add(name)
    assert evaluating <= set(catalogue.LANGUAGES) | set(HARMLESS), evaluating - set(catalogue.LANGUAGES) - set(HARMLESS)
    assert set(catalogue.LEFT_OUT) | set(catalogue.LANGUAGES) | set(HARMLESS) | set(PROGRAMS) <= set(package.names())


@pytest.mark.slow
def test_opening_the_family_imports_no_generator() -> None:
    imports = "import sys, recipes.smollm2, recipes.smollm2_lora, sandboxes.reasoning, rewards.reasoning"
    code = f"{imports}; print({{'reasoning_gym', 'sympy', 'numpy'}} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"


def test_missing_package_is_reported_with_the_install_command() -> None:
    code = """
import sys
sys.modules["reasoning_gym"] = None
from agentrl.errors import UserError
from sandboxes.reasoning import Reasoning
try:
    Reasoning()
except UserError as error:
    print(error.fix)
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "make smollm2" in process.stdout


@pytest.mark.models
def test_no_problem_has_a_blank_answer() -> None:
    """One in sixty problems of `ab` cancels out, so an empty answer would be right."""
    answers = [problems.problem(Source(name="ab"), seed=0, heldout=False, number=number).answer for number in range(128)]
    assert all(answer.strip() for answer in answers)

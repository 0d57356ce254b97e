"""Cases that start at the failing turn: the turns before are replayed once, captured, and never sampled again."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config import RolloutConfig
from agentrl.errors import ServingError, UserError
from agentrl.evaluation import replay, results
from agentrl.failure.case import load_suite, save_case
from agentrl.failure.collection import Collection
from agentrl.failure.trace import Trace
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from tests.evaluation.suite_parts import make_case, make_suite

HERE = Path(__file__)
BACKEND = f"sandbox.backend={HERE}:backend"


def backend(*, root: Path, run_label: str) -> ScriptedSandboxes:
    return ScriptedSandboxes(printing(json.loads((root / "prints.json").read_text())))


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def policy() -> ScriptedPolicy:
    """Reads twice, and submits a wrong answer."""
    look, submit = call("python", code="print(97)"), call("submit", answer="fail")
    return ScriptedPolicy(byte_tokenizer(), lambda turn, episode: look if turn < 2 else submit)


def better() -> ScriptedPolicy:
    """Submits the right answer at the second attempt. Records its turns in `turns.jsonl`."""

    def say(turn: int, episode: str) -> str:
        with Path("turns.jsonl").open("a") as file:
            file.write(f"{turn}\n")
        if len(Path("turns.jsonl").read_text().split()) == 1:
            raise ServingError("the server is gone")
        return call("submit", answer="pass")

    return ScriptedPolicy(byte_tokenizer(), say, version=4)


def foreign() -> ScriptedPolicy:
    policy = better()
    policy.tokenizer.chat_template = "{{ ' ' }}" + policy.tokenizer.chat_template
    return policy


def talker() -> ScriptedPolicy:
    """Calls a server's tool twice, and submits a wrong answer."""
    turns = [call("echo", text="a"), call("echo", text="b"), call("submit", answer="fail")]
    return ScriptedPolicy(byte_tokenizer(), lambda turn, episode: turns[turn])


def agentrl(*arguments: object) -> tuple[str, str]:
    """Returns the error and the output."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return "" if result.exit_code in (0, 1) and not isinstance(result.exception, UserError) else str(result.exception), result.output


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with one failure, in the third turn."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "prints.json").write_text('"97"')
    make_suite(tmp_path / "s", make_case("x"))
    agentrl("eval", "s", "--policy", f"{HERE}:policy", BACKEND, "--run-dir", "r")
    assert agentrl("failures", "tag", "r", "eval-x-r0-a0", "--as", "misread_output", "--turn", 3)[0] == ""
    return tmp_path / "r"


def promote(turn: object) -> tuple[str, str]:
    return agentrl("failures", "promote", "r", "eval-x-r0-a0", "--into", "late", "--from-turn", turn)


def trace_of(run: Path) -> Trace:
    with Collection(run) as collection:
        return next(iter(collection.traces()))


@pytest.mark.slow
def test_a_case_starts_at_the_failing_turn_and_samples_only_from_there(run: Path, tmp_path: Path) -> None:
    assert promote("failing")[0] == ""
    (case,) = load_suite(tmp_path / "late").cases
    before = trace_of(run).episode
    assert case.start is not None and before is not None and case.id.endswith("-t3") and case.key != case.task.key
    turns = before.trajectories[0].turns
    assert [turn.completion_ids for turn in case.start.trajectories[0].turns] == [turn.completion_ids for turn in turns[:2]]
    assert case.start.prompt_ids == (turns[2].prompt_ids,) and case.start.snapshot is not None

    error, out = agentrl("eval", "late", "--policy", f"{HERE}:better", BACKEND, "--run-dir", "again")
    assert error == "", out
    assert Path("turns.jsonl").read_text().split() == ["2", "2"], "earlier turns are not sampled, even after a server failure"
    (attempt,) = results.load_results(tmp_path / "again" / "suite").attempts
    assert (attempt.score, attempt.turns, attempt.task_key) == (1.0, 1, case.key) and attempt.tokens < 100

    assert "its task is already in the suite, as case" in promote(3)[1]
    assert promote(2)[0] == "" and len(load_suite(tmp_path / "late").cases) == 2, "another turn is another case"
    assert promote(1)[0] == "" and [late_case.start is None for late_case in load_suite(tmp_path / "late").cases].count(True) == 1


@pytest.mark.slow
def test_tokens_of_another_tokenizer_raise_before_anything_runs(run: Path, tmp_path: Path) -> None:
    promote("failing")
    code = CliRunner().invoke(app, ["eval", "late", "--policy", f"{HERE}:foreign", BACKEND, "--run-dir", "again"]).exit_code
    assert code == 2 and not Path("turns.jsonl").exists()
    (case,) = load_suite(tmp_path / "late").cases
    chat = replay.ChatFormat(better().tokenizer)
    replay.check_start_tokens([load_suite(tmp_path / "late")], chat, None, RolloutConfig())
    assert case.start is not None
    trajectory = case.start.trajectories[0]
    first = trajectory.turns[0]
    unknown = replace(first, completion_ids=(*first.completion_ids[:-1], 10**9))
    for other in (unknown, replace(first, prompt_ids=(1, 2))):
        changed = replace(case.start, trajectories=(replace(trajectory, turns=(other, *trajectory.turns[1:])),))
        save_case(tmp_path / "late", replace(case, start=changed))
        with pytest.raises(UserError, match="a different tokenizer, template or wording"):
            replay.check_start_tokens([load_suite(tmp_path / "late")], chat, None, RolloutConfig())
    save_case(tmp_path / "late", case)
    with pytest.raises(UserError, match="a different tokenizer, template or wording"):
        replay.check_start_tokens([load_suite(tmp_path / "late")], chat, None, RolloutConfig(instructions="Look first."))
    endpoint = ("--policy", "http://127.0.0.1:9/v1", "--model", "m")
    assert "accepts only messages" in agentrl("eval", "late", *endpoint, "--run-dir", "e")[0]


def test_an_episode_that_cannot_be_replayed_raises_with_the_reason(run: Path, tmp_path: Path) -> None:
    for turn, message in (("9", "has no turn 9"), ("0", "has no turn 0"), ("x", "'x' is not a turn")):
        assert message in promote(turn)[0]
    (tmp_path / "prints.json").write_text('"98"')
    assert "up to turn 3: turn 2 starts with different tokens" in promote("3")[0]
    assert not (tmp_path / "late").exists(), "nothing is written"
    trace = trace_of(run)
    with pytest.raises(UserError, match="no exact tokens"):
        replay.start_turn(replace(trace, task=None, episode=None), "1")
    with pytest.raises(UserError, match="has no turn"):
        replay.start_turn(replace(trace, tags=()), "failing")


@pytest.mark.slow
def test_a_case_of_a_recipe_with_servers_and_bounds_can_start_mid_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers' tools are in the prompt and are called in the replay; a limit on calls applies as in the first episode."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "prints.json").write_text('""')
    case = make_case("x")
    make_suite(tmp_path / "s", replace(case, task=replace(case.task, tools=("mcp:it", "submit"))))
    program = [sys.executable, "-S", "-E", str(HERE.parents[1] / "agent" / "hostile_mcp.py"), "honest"]
    servers = "mcp=" + json.dumps({"it": {"host_command": program}})
    recipe = (BACKEND, servers, 'tools={"echo": {"calls": 1}}')

    error, out = agentrl("eval", "s", "--policy", f"{HERE}:talker", *recipe, "--run-dir", "r")
    assert error == "", out
    assert agentrl("failures", "promote", "r", "eval-x-r0-a0", "--into", "late", "--from-turn", "3")[0] == ""
    (late,) = load_suite(tmp_path / "late").cases
    assert late.start is not None
    first, second = late.start.trajectories[0].turns
    assert first.tool_results[0].output == "a" and "may be called 1 times" in second.tool_results[0].output

    error, out = agentrl("eval", "late", "--policy", f"{HERE}:talker", *recipe, "--run-dir", "again")
    (attempt,) = results.load_results(tmp_path / "again" / "suite").attempts
    assert error == "" and (attempt.score, attempt.turns) == (0.0, 1), out
    without = agentrl("eval", "late", "--policy", f"{HERE}:talker", BACKEND, "--run-dir", "without")[0]
    assert "declare the server in the recipe as mcp.it" in without


def test_wording_of_a_tool_that_the_task_lacks_does_not_prevent_promotion(run: Path, tmp_path: Path) -> None:
    """The wording is for other tasks of the run."""
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["tools"] = {"search": {"description": "Search the archive.", "arguments": {}}}
    (run / "recipe.json").write_text(json.dumps(recipe))
    error, out = promote("failing")
    assert error == "", out
    assert load_suite(tmp_path / "late").cases[0].start is not None

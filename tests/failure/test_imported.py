"""A folder of production traces becomes a suite with `import`, `promote` and `eval`; errors for missing parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.agent import load_tools
from agentrl.cli import app
from agentrl.errors import AgentRLError, TaskError, UserError
from agentrl.failure.case import load_suite
from agentrl.failure.promote import UserParts, describe_excluded_messages, read_truths, task_from_trace
from agentrl.failure.trace import CaptureReason, ImportedMessage, Trace
from agentrl.records import Limits, Message, ToolCall
from agentrl.task.recorded_tools import RECORDED_TOOLS, Recording
from tests.evaluation.suite_parts import OVERRIDES

PROJECT = {
    "pyproject.toml": "",
    "judge.py": "from agentrl.records import Score\n\nasync def exact(task, episode):\n"
    "    return Score(value=float(episode.answer == task.data['answer']))\n",
    "policies.py": "from agentrl.testing import ScriptedPolicy, byte_tokenizer\n\n"
    'LOOK = \'<tool_call>{"name": "look_up", "arguments": {"order": 4711}}</tool_call>\'\n\n'
    "def right() -> ScriptedPolicy:\n"
    "    return ScriptedPolicy(byte_tokenizer(), lambda turn, episode: LOOK if turn == 0 else 'It is on its way.')\n\n"
    "def wrong() -> ScriptedPolicy:\n"
    "    return ScriptedPolicy(byte_tokenizer(), lambda turn, episode: LOOK.replace('4711', '1') if turn == 0 else 'I cannot say.')\n",
}
CHAT = [
    {"role": "system", "content": "You help customers."},
    {"role": "user", "content": "Where is order 4711?"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"order": 4711}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "shipped on Monday"},
    {"role": "assistant", "content": "I cannot say."},
    {"role": "user", "content": "Try again."},
    {"role": "assistant", "content": "Sorry."},
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "one.json").write_text(json.dumps({"messages": CHAT}))
    return tmp_path


def agentrl(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code and (code or result.exception is None), (result.output, result.exception)
    return result.output if not isinstance(result.exception, AgentRLError) else str(result.exception)


def test_a_folder_of_traces_becomes_a_suite_that_distinguishes_policies(project: Path) -> None:
    agentrl("failures", "import", "support", "traces")
    (row,) = json.loads(agentrl("failures", "list", "support", "--json"))["traces"]
    (project / "truths.jsonl").write_text(json.dumps({"trace": row["id"], "truth": "It is on its way."}) + "\n")
    output = agentrl("failures", "promote", "support", "--phase", "imported", "--into", "evals/support", code=1)
    assert "can become a case: 1 have no task" in output and "--verifier" in output
    promote = ("failures", "promote", "support", "--phase", "imported", "--into", "evals/support", "--verifier", "./judge.py:exact")
    output = agentrl(*promote, code=1)
    assert "the correct answer: give --truths FILE" in output and row["id"] in output and "keys of its origin: " in output
    output = agentrl(*promote, "--truths", "truths.jsonl")
    assert "1 new case in evals/support" in output and "later messages of the user are excluded (1)" in output
    (case,) = load_suite(project / "evals" / "support").cases
    assert [message.content for message in case.task.prompt] == ["You help customers.", "Where is order 4711?"]
    assert case.task.tools == (RECORDED_TOOLS,) and case.task.data["answer"] == "It is on its way."
    assert "already exist" in agentrl(*promote, "--truths", "truths.jsonl"), "once"
    for policy, code in (("right", 0), ("wrong", 1)):
        evaluation = agentrl(
            "eval", "evals/support", *OVERRIDES, "--policy", f"./policies.py:{policy}", "--run-dir", policy, "--json", code=code
        )
        assert json.loads(evaluation.splitlines()[-1])["passed"] is (policy == "right")
    wrong_episodes = (project / "wrong" / "suite" / "episodes.jsonl").read_text()
    assert (
        "look_up has no recorded answer to this call" in wrong_episodes
        and "shipped on Monday" in (project / "right/suite/episodes.jsonl").read_text()
    )


def trace(*spoken: ImportedMessage, **more: Any) -> Trace:
    return Trace(id="t1", why=CaptureReason.IMPORTED, source="otel", spoken=spoken, **more)


def utterance(role: str, content: str = "", *calls: ToolCall, **more: Any) -> ImportedMessage:
    return ImportedMessage(message=Message(role=role, content=content, tool_calls=calls), **more)


ALL_PARTS = UserParts(verifiers=("rewards.exact:exact",), truths={"t1": "4"})


def test_one_error_lists_everything_that_is_missing() -> None:
    with pytest.raises(UserError) as error:
        task_from_trace(trace(utterance("assistant", "hello", ToolCall(name="f", arguments={})), origin={"service": "shop"}), UserParts())
    for part in ("a user message before", "--verifier", "--truths FILE", "--tools module:attr", "keys of its origin: service"):
        assert part in str(error.value), part


def test_truth_may_come_from_the_origin_and_tools_from_stubs() -> None:
    imported = trace(utterance("user", "2 + 2?"), utterance("assistant", "", ToolCall(name="f", arguments={})), origin={"expected": "4"})
    stubs = replace(ALL_PARTS, truths={}, truth_from="expected", tools=("stubs:f",), image="sandboxes/mine")
    task = task_from_trace(imported, stubs)
    assert (task.data["answer"], task.tools, task.sandbox.image) == (
        "4",
        ("stubs:f",),
        "sandboxes/mine",
    ) and RECORDED_TOOLS not in task.data
    assert describe_excluded_messages(imported) == ""


async def test_results_belong_to_calls_by_id_or_else_in_order() -> None:
    calls = [ToolCall(name="f", arguments={"x": number, "y": "a"}) for number in range(4)]
    schema = {"type": "function", "function": {"name": "g", "description": "G.", "parameters": {"type": "object", "properties": {}}}}
    imported = trace(
        utterance("user", "go"),
        utterance("assistant", "", calls[0], calls[1], call_ids=("a", "b")),
        utterance("tool", "of b", answers="b"),
        utterance("tool", "of a", answers="a", failed=True),
        utterance("assistant", "", calls[2], calls[3], calls[0]),
        utterance("tool", "third"),
        tools=(schema,),
    )
    task = task_from_trace(imported, ALL_PARTS)
    assert [(call.arguments["x"], call.output, call.failed) for call in Recording.of(task).calls] == [
        (0, "of a", True),
        (1, "of b", False),
        (2, "third", False),
    ], "calls without a recorded result are excluded"
    tools = load_tools(task.tools, task=task)
    assert list(tools) == ["g", "f"] and tools["g"].schema == schema
    properties = tools["f"].schema["function"]["parameters"]["properties"]
    assert list(properties) == ["x", "y"], "without a schema, the arguments of its calls"
    outcome = await tools["f"]({"y": "a", "x": 1}, None, Limits())
    assert (outcome.output, outcome.ok) == ("of b", True), "the order of the arguments does not matter"
    outcome = await tools["f"]({"x": 3, "y": "a"}, None, Limits())
    assert not outcome.ok and "no recorded answer to this call; 3 calls are recorded, with the arguments x, y" in outcome.output
    assert list(load_tools(task.tools)) == [], "without a task only names are checked"
    with pytest.raises(TaskError, match="no valid recording"):
        load_tools(task.tools, task=replace(task, data={}))


@pytest.mark.parametrize("text", ["{", "[]", '{"trace": "a"}', "7", '"a"', "[" * 100_000])
def test_an_invalid_truths_file_is_an_error_with_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "truths").write_text('{"trace": "a", "truth": 4}\n\n' + text + "\n")
    with pytest.raises(UserError, match="truths:3 does not contain a truth"):
        read_truths(tmp_path / "truths")
    (tmp_path / "truths").write_text('{"trace": "a", "truth": 4}\n')
    assert read_truths(tmp_path / "truths") == {"a": 4}
    with pytest.raises(UserError, match=r"(?i)no such"):
        read_truths(tmp_path / "none")

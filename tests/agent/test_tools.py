"""The built-in tools: the programs they run, invalid arguments, and the agent's outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import load_tools
from agentrl.agent.filetools import SHIPPED_TOOLS
from agentrl.agent.tools import BUILT_IN, MAX_TEXT, render_result
from agentrl.errors import TaskError
from agentrl.records import ExecResult, Limits, SandboxSpec, Task
from agentrl.sandbox import select_backend
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing

LIMITS = Limits(tool_timeout_s=5.0, tool_output_chars=400)
PROGRAMS = {"python": "code", "python_session": "code", "shell": "command"}


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_runs_in_its_session(name: str) -> None:
    sandbox = await ScriptedSandboxes(lambda code: ExecResult(exit_code=0, stdout=code, stderr="", wall_s=0.0)).open(SandboxSpec(image="i"))
    outcome = await BUILT_IN[name]({PROGRAMS[name]: "ls"}, sandbox, LIMITS)
    assert outcome.ok and outcome.output == {"shell": "sh -c ls"}.get(name, "ls")
    assert sandbox.sessions == [{"python_session": "agent"}.get(name, "")]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("value", [None, 3, ["ls"], pytest.param("a\0b", id="nul"), pytest.param("x" * (MAX_TEXT + 1), id="long")])
async def test_an_invalid_argument_is_an_error_for_the_agent(name: str, value: Any) -> None:
    sandbox = await ScriptedSandboxes(printing("")).open(SandboxSpec(image="i"))
    outcome = await BUILT_IN[name]({PROGRAMS[name]: value}, sandbox, LIMITS)
    assert not outcome.ok and outcome.output.startswith(f"error: {name} ") and len(outcome.output) < 200
    assert sandbox.sessions == []


def test_the_agent_is_notified_of_an_ended_and_a_new_session() -> None:
    timed_out = ExecResult(exit_code=None, stdout="so far\n", stderr="", wall_s=5.0, reason="timeout", session_ended=True)
    assert render_result(timed_out, LIMITS).splitlines() == [
        "so far",
        "error: timed out after 5 s",
        "note: the session has ended; the next call starts a new one",
    ]
    fresh = ExecResult(exit_code=0, stdout="", stderr="", wall_s=0.1, restarted=True)
    assert render_result(fresh, LIMITS) == "note: this is a new session; variables of earlier calls are gone"


def test_schemas_require_their_argument() -> None:
    assert load_tools(tuple(SHIPPED_TOOLS)).keys() == {*PROGRAMS, "submit", "view", "create", "replace", "insert", "search"}
    for name, argument in PROGRAMS.items():
        function = BUILT_IN[name].schema["function"]
        assert function["name"] == name and function["parameters"]["required"] == [argument]
    with pytest.raises(TaskError, match="python_session, shell, submit, view"):
        load_tools(("bash",))


@pytest.mark.bubblewrap
async def test_an_episode_can_use_every_built_in_program_tool(tokenizer: Any, task: Task, make_runner: Any, tmp_path: Any) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    backend = select_backend("bubblewrap", run_label="test", root=tmp_path)
    turns = [
        call("python_session", code="import csv\nrows = list(csv.DictReader(open('a.csv')))"),
        call("python_session", code="len(rows)"),
        call("shell", command="pwd; echo $HOME; wc -l < a.csv; exit 3"),
        call("python", code="print('rows' in globals())"),
        call("python_session", code="import sys; sys.exit()"),
        call("python_session", code="rows"),
        call("submit", answer="1"),
    ]
    task = replace(task, tools=tuple(BUILT_IN), sandbox=SandboxSpec(image="image"), limits=replace(LIMITS, turns=9, episode_tokens=8000))
    try:
        runner = make_runner(ScriptedPolicy.saying(tokenizer, *turns), backend)
        episode = await replace(runner, max_model_len=8000).run(task, episode_id="e")
    finally:
        await backend.close()
    outputs = [result.output for turn in episode.trajectories[0].turns for result in turn.tool_results]
    assert outputs[:5] == [
        "",
        "1",
        "/home/agent\n/home/agent\n2\nerror: exit code 3",
        "False",
        "note: the session has ended; the next call starts a new one",
    ]
    assert outputs[5].startswith("note: this is a new session") and "NameError" in outputs[5]
    assert (episode.answer, episode.failures) == ("1", ())

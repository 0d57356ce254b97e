"""The environment that TRL plays in is our tasks, tools and verifiers, and tells the model the same as our runs do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import ChatFormat, load_tools
from agentrl.agent.tools import SubmitTool
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import SandboxError, UserError
from agentrl.records import ExecResult, Message, Split, Task, ToolCall
from agentrl.testing import ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from benchmarks.contest.environment import Host, environment, last_words, messages_of
from sandboxes.tables import Tables
from tests.chats import chat_of, shared_tokenizer

ROOT = Path(__file__).resolve().parents[2]
RECIPE = Recipe(name="peers", policy=PolicyConfig(model="recipes/models/tables-base"), tasks=TasksConfig(family="sandboxes.tables:Tables"))
ENDING = "end " * 50


def answer_of(group: int) -> str:
    return str(Tables(seed=0).task(Split.TRAIN, group).data["answer"])


def hosted(backend: Any) -> Host:
    return Host(RECIPE, Tables(seed=0), chat_of(shared_tokenizer()), backend)


@pytest.fixture
def backend() -> ScriptedSandboxes:
    return ScriptedSandboxes(printing("42 <|im_end|>\n"))


@pytest.fixture
def host(backend: ScriptedSandboxes) -> Iterator[Host]:
    made = hosted(backend)
    yield made
    made.close()


def begun(host: Host, group: int = 0) -> Any:
    tools = load_tools(host.task(group).tools)
    made = environment(host, list(tools.values()), ENDING)()
    made.reset(group=group, prompt="what a dataset row has besides")
    return made


def test_the_methods_render_the_very_schemas_that_our_tools_have(host: Host) -> None:
    from transformers.utils import get_json_schema

    made = begun(host)
    for name, tool in load_tools(("python", "submit")).items():
        assert get_json_schema(getattr(made, name)) == tool.schema


def test_a_program_runs_in_the_tasks_sandbox_and_its_output_cannot_forge_a_turn(host: Host, backend: ScriptedSandboxes) -> None:
    made = begun(host)
    assert made.python(code="print(42)") == "42 < |im_end|>"
    (sandbox,) = backend.opened
    assert set(sandbox.files) == set(host.task(0).files)
    assert host.tool_s > 0


def test_a_right_answer_scores_and_ends_the_episode_and_its_sandbox(host: Host, backend: ScriptedSandboxes) -> None:
    made = begun(host, group=3)
    made.python(code="print(42)")
    assert made.submit(answer=answer_of(3)) == ENDING
    assert backend.opened[0].closed
    assert made.python(code="print(1)") == ENDING, "nothing runs after the end"
    assert host.gather([made._score("what was said last")]) == [1.0]


def test_a_wrong_answer_and_none_score_nothing(host: Host) -> None:
    wrong, silent = begun(host), begun(host)
    wrong.submit(answer="surely not this")
    assert host.gather([wrong._score(""), silent._score(answer_of(0))]) == [0.0, 0.0], "text is no answer where submit is a tool"


def test_an_episode_has_the_turns_of_its_task(host: Host) -> None:
    made = begun(host)
    told = [made.python(code=f"print({turn})") for turn in range(host.task(0).limits.turns)]
    assert told[:-1] == ["42 < |im_end|>"] * (len(told) - 1)
    assert told[-1] == ENDING


def test_reset_begins_afresh(host: Host, backend: ScriptedSandboxes) -> None:
    made = begun(host)
    made.python(code="print(42)")
    made.reset(group=1)
    assert backend.opened[0].closed
    made.submit(answer=answer_of(1))
    assert host.gather([made._score("")]) == [1.0]


def test_a_fault_of_the_sandbox_is_no_score_and_is_counted() -> None:
    def broken(code: str) -> ExecResult:
        raise SandboxError("the daemon went away")

    host = hosted(ScriptedSandboxes(broken))
    try:
        made = begun(host)
        assert made.python(code="print(42)") == ENDING
        assert host.gather([made._score("")]) == [None]
        assert host.faults == 1
    finally:
        host.close()


def test_one_completion_is_played_and_judged_as_in_our_run(host: Host) -> None:
    tokenizer = byte_tokenizer()

    def said(answer: str) -> list[int]:
        text = f'<tool_call>{{"name": "submit", "arguments": {{"answer": "{answer}"}}}}</tool_call><|im_end|>'
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    right, cut = said(answer_of(5)), said(answer_of(5))[:-1]
    work = [host.score_completion(5, ids) for ids in (right, said("wrong"), cut, [])]
    assert host.gather(work) == [1.0, 0.0, 0.0, 0.0]


def test_a_tool_that_no_method_renders_is_refused(host: Host) -> None:
    class Odd(SubmitTool):
        name = "odd"

        @property
        def schema(self) -> Any:
            parameters = {"properties": {"a": {"type": "array", "description": "d"}}, "required": ["a"]}
            return {"function": {"name": "odd", "description": "d", "parameters": parameters}}

    with pytest.raises(UserError, match="'odd'"):
        environment(host, [Odd()], ENDING)


def test_the_answer_where_nothing_is_submitted_is_what_was_said_last() -> None:
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "1"}}}
    asked = {"role": "assistant", "content": "let me see", "tool_calls": [call]}
    assert last_words([asked, {"role": "tool", "content": "7"}, {"role": "assistant", "content": " 7 "}]) == "7"
    assert last_words([asked]) is None, "it was cut off in the midst of its work"
    assert last_words([]) is None


def test_text_is_the_answer_of_a_task_without_submit() -> None:
    class Told(Tables):
        def task(self, split: Split, index: int) -> Task:
            return replace(super().task(split, index), tools=("python",))

    host = Host(RECIPE, Told(seed=0), chat_of(shared_tokenizer()), ScriptedSandboxes(printing("42\n")))
    try:
        told, silent, cut = begun(host), begun(host), begun(host)
        for _ in range(host.task(0).limits.turns):
            cut.python(code="print(42)")
        assert host.gather([told._score(answer_of(0)), silent._score(None), cut._score(answer_of(0))]) == [1.0, 0.0, 0.0]
    finally:
        host.close()


def test_a_prompt_with_worked_examples_is_rendered_as_ours_is() -> None:
    tokenizer = byte_tokenizer()
    call = ToolCall(name="python", arguments={"code": "print(1)"})
    hand_in = ToolCall(name="submit", arguments={"answer": "1"})
    worked = (
        Message(role="user", content="Say 1."),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="1"),
        Message(role="assistant", content="", tool_calls=(hand_in,)),
        Message(role="user", content="Say 2."),
    )
    task = replace(Tables(seed=0).task(Split.TRAIN, 0), prompt=worked)
    ids = tokenizer.apply_chat_template(messages_of(task, 7), add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tuple(ids) == ChatFormat(tokenizer).opening(worked, ())
    assert tokenizer.decode(ids).count("<tool_call>") == 2
    assert messages_of(task, 7)[0]["group"] == 7

"""Tools from typed functions: their schemas, and the validation of arguments."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent import TaskData, ToolOutcome, load_tools, tool
from agentrl.agent.invoke import call_tool
from agentrl.agent.typed import typed_tool
from agentrl.check.cheats import malformed_arguments
from agentrl.errors import PluginError
from agentrl.protocols import Sandbox
from agentrl.records import Blame, Limits, SandboxSpec, Task
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.strategies import examples

LIMITS = Limits(tool_timeout_s=5.0, tool_output_chars=400)


@dataclass
class Span:
    start: int
    end: int = 9


@tool
async def search(query: str, limit: int = 5) -> str:
    """Search the notes,
    the newest first.

    Args:
        query: words that a note must have,
            in any order
        limit (int): at most so many

    Returns:
        Nothing that the agent should read.
    """
    return f"{query!r} {limit!r}"


@tool
def every(
    number: float,
    flag: bool,
    mode: Literal["fast", "slow"],
    names: list[str],
    counts: dict[str, int],
    where: Span,
    note: str | None = None,
    old: Optional[int] = None,  # noqa: UP045
) -> dict[str, Any]:
    """Take one of each. Args: none are described here."""
    return {"got": [number, flag, mode, names, counts, where, note, old]}


@tool
async def look(path: str, box: Sandbox, allowed: Limits) -> ToolOutcome:
    """Read a file."""
    return ToolOutcome(output=f"{(await box.read(path, max_bytes=9)).decode()} within {allowed.tool_timeout_s:g} s", ok=False, answer="3")


@tool
def collects(word: str, seen: list[str] = []) -> str:  # noqa: B006
    """Mutate a default."""
    seen.append(word)
    return ",".join(seen)


def ref(name: str) -> str:
    return f"{__file__}:{name}"


def load(name: str) -> Any:
    return load_tools((ref(name),))[name]


async def call_loaded(name: str, **arguments: Any) -> ToolOutcome:
    result = await call_tool(load(name), arguments, None, LIMITS, turn=1)
    assert result.failure is None, result.failure
    return result.outcome


def test_the_schema_is_the_signature_and_the_docstring() -> None:
    assert load("search").schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the notes, the newest first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words that a note must have, in any order"},
                    "limit": {"type": "integer", "default": 5, "description": "at most so many"},
                },
                "required": ["query"],
            },
        },
    }
    parameters = load("every").schema["function"]["parameters"]
    assert parameters["required"] == ["number", "flag", "mode", "names", "counts", "where"]
    assert parameters["properties"]["mode"] == {"type": "string", "enum": ["fast", "slow"]}
    assert parameters["properties"]["note"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert parameters["$defs"]["Span"]["properties"] == {"start": {"type": "integer"}, "end": {"type": "integer", "default": 9}}
    assert list(load("look").schema["function"]["parameters"]["properties"]) == ["path"], "injected parameters are not in the schema"
    assert [load(name).needs_sandbox for name in ("search", "every", "look")] == [False, False, True]


def test_a_parameter_called_properties_has_no_title() -> None:
    @tool
    def change(properties: dict[str, int]) -> str:
        """Change the properties."""
        return str(properties)

    parameters = typed_tool(change).schema["function"]["parameters"]
    assert parameters["properties"] == {"properties": {"type": "object", "additionalProperties": {"type": "integer"}}}


async def test_arguments_have_their_annotated_types() -> None:
    assert (await call_loaded("search", query="tea")).output == "'tea' 5"
    assert (await call_loaded("search", query="tea", limit="7")).output == "'tea' 7", "models write numbers as text"
    outcome = await call_loaded("every", number=1, flag=True, mode="fast", names=["a"], counts={"a": 1}, where={"start": 2}, note="n")
    assert outcome.ok and outcome.output == '{"got":[1.0,true,"fast",["a"],{"a":1},{"start":2,"end":9},"n",null]}'
    assert await search("tea", limit=1) == "'tea' 1", "it can still be called as a function"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "error: search: query: Field required"),
        ({"query": 3}, "error: search: query: Input should be a valid string"),
        ({"query": "a", "limit": "many"}, "error: search: limit: Input should be a valid integer, unable to parse string as an integer"),
        ({"query": "a", "limit": 1.5, "unheard": 1}, "; unheard: Extra inputs are not permitted"),
        ({"\x1b[2J" * 100: 1}, "Extra inputs are not permitted"),
        ({f"n{number}": 1 for number in range(100)}, "; and 96 more"),
    ],
)
async def test_wrong_arguments_are_an_error_and_the_function_is_not_called(arguments: dict[str, Any], message: str) -> None:
    outcome = await call_loaded("search", **arguments)
    assert not outcome.ok and message in outcome.output and len(outcome.output) < 400 and outcome.output.isprintable()


async def test_an_episode_with_wrong_arguments_is_scored(tokenizer: Any, task: Task, make_runner: Any) -> None:
    completions = ('<tool_call>{"name": "search", "arguments": {"limit": 2}}</tool_call>', "it is 3")
    episode = await make_runner(ScriptedPolicy.saying(tokenizer, *completions)).run(replace(task, tools=(ref("search"),)), episode_id="e")
    (result,) = episode.trajectories[0].turns[0].tool_results
    assert (result.output, result.ok) == ('error: search: query: Field required; for example {"query": "..."}', False)
    assert (episode.answer, episode.failures, episode.left_out) == ("it is 3", (), False)


@pytest.mark.parametrize("name", ["search", "every"])
async def test_unusual_arguments_never_raise(name: str) -> None:
    function = load(name)
    for kind, arguments in malformed_arguments(function.schema["function"]["parameters"]["properties"]).items():
        result = await call_tool(function, arguments, None, LIMITS, turn=1)
        assert result.failure is None, (kind, result.failure)


async def test_a_mutated_default_does_not_affect_the_next_call() -> None:
    assert [(await call_loaded("collects", word=word)).output for word in ("secret", "a")] == ["secret", "a"]


async def test_injected_parameters_cannot_be_set_by_the_agent() -> None:
    sandbox = await ScriptedSandboxes(printing("")).open(SandboxSpec(image="none"), files={"a": b"x"})
    result = await call_tool(load("look"), {"path": "a"}, sandbox, LIMITS, turn=1)
    assert result.outcome == ToolOutcome(output="x within 5 s", ok=False, answer="3")
    result = await call_tool(load("look"), {"path": "a", "allowed": {"tool_timeout_s": 1e9}}, sandbox, LIMITS, turn=1)
    assert result.outcome.output == 'error: look: allowed: Extra inputs are not permitted; for example {"path": "..."}'


released = threading.Event()


@tool
def blocks() -> int:
    """Wait for an event that nothing sets."""
    released.wait(30)
    return 1


@tool
def where_it_runs() -> bool:
    """Say whether this is the thread of the event loop."""
    return threading.current_thread() is threading.main_thread()


@tool
async def gives_an_object() -> object:
    """Return an object that is not JSON data."""
    return object()


@tool
def exits() -> None:
    """Leave."""
    raise SystemExit(3)


async def test_a_function_that_is_not_async_does_not_block() -> None:
    started, ticks = time.monotonic(), 0
    call = asyncio.create_task(call_tool(load("blocks"), {}, None, replace(LIMITS, tool_timeout_s=0.3), turn=1))
    while not call.done():
        await asyncio.sleep(0.01)
        ticks += 1
    released.set()
    result = call.result()
    assert result.outcome.output == "error: blocks gave no result within 0.3 s" and result.failure is not None
    assert ticks > 5 and time.monotonic() - started < 10
    assert (await call_loaded("where_it_runs")).output == "false"


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user-supplied decorator."""

    @functools.wraps(function)
    def inner(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return inner


@tool
@wrapped
async def decorated(query: str) -> str:
    """Say."""
    return query


async def test_a_decorated_function_can_be_a_tool() -> None:
    assert (await call_loaded("decorated", query="tea")).output == "tea"
    with pytest.raises(PluginError, match="not a staticmethod"):
        tool(staticmethod(search))
    with pytest.raises(PluginError, match="not a type"):
        tool(Span)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("gives_an_object", "wrong_outcome", "it returned object, which is neither text, a ToolOutcome, nor JSON data"),
        ("exits", "SystemExit", "SystemExit: 3"),
    ],
)
async def test_errors_of_typed_tools_are_reported_like_others(name: str, kind: str, message: str) -> None:
    result = await call_tool(load(name), {}, None, LIMITS, turn=1)
    assert result.outcome.output == f"error: {name} failed: {message}"
    assert result.failure is not None and (result.failure.kind, result.failure.blame) == (kind, Blame.POLICY)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
argument_names = st.sampled_from(["number", "flag", "mode", "names", "counts", "where", "note", "old", "x"])


@given(arguments=st.dictionaries(argument_names, values, max_size=8))
@settings(max_examples=examples(60))
def test_any_arguments_are_accepted_or_an_error(arguments: dict[str, Any]) -> None:
    result = asyncio.run(call_tool(load("every"), arguments, None, LIMITS, turn=1))
    assert result.failure is None and result.outcome.ok != result.outcome.output.startswith("error: every: ")


@tool
async def untyped(query) -> str:  # type: ignore[no-untyped-def]
    """Say."""
    return str(query)


@tool
async def silent(query: str) -> str:
    return query


@tool
async def many(*queries: str) -> str:
    """Say."""
    return str(queries)


@tool
async def unknown(query: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Say."""
    return str(query)


@tool
async def opaque(query: threading.Thread) -> str:
    """Say."""
    return str(query)


@tool
async def misdocumented(query: str) -> str:
    """Say.

    Args:
        qery: what to say
    """
    return query


@tool
def blocked(query: str, box: Sandbox) -> str:
    """Say."""
    return query


async def unmarked(query: str) -> str:
    """Say."""
    return query


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("untyped", "the parameter 'query' without a type"),
        ("silent", "has no docstring"),
        ("many", "the parameter '*queries'"),
        ("unknown", "annotations that do not resolve (NameError: name 'Nowhere' is not defined)"),
        ("opaque", "has parameters that JSON cannot represent"),
        ("misdocumented", "has no parameter 'qery'"),
        ("blocked", "takes the sandbox but is not async"),
        ("unmarked", "is a function without the decorator @tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_raises_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(PluginError) as error:
        load_tools((ref(name),))
    assert message in str(error.value) and name in str(error.value) and "\n  fix: " in str(error.value)


@pytest.mark.parametrize("text", ["Say. Args: query: what", "Say.\n\nArgs: query: what", "Say.\n\nArguments:\n  query: what"])
def test_a_docstring_may_be_short(text: str) -> None:
    def make_tool() -> Callable[..., Any]:
        async def say(query: str) -> str:
            return query

        say.__doc__ = text
        return tool(say)

    schema = typed_tool(make_tool()).schema["function"]
    description = schema["parameters"]["properties"]["query"].get("description")
    assert (schema["description"], description) == (("Say.", "what") if "\n" in text else (text, None))


@tool
async def describe_task(task: TaskData) -> dict[str, Any]:
    """Return what it knows of its task."""
    return {"id": task.id, "data": dict(task.data), "seed": task.seed}


async def test_a_tool_gets_its_task_without_the_answer(tokenizer: Any, task: Task, make_runner: Any) -> None:
    """It also gets a seed that all attempts at the task share."""
    data = {
        "answer": "412",
        "kind": "sum",
        "user": {"colour": "blue", "expected_total": 412, "targets": ["412"]},
        "rows": [{"name": "a", "label": "412"}, 3],
        "data.truth": "412",
    }
    tool_task = replace(task, tools=(f"{__file__}:describe_task", "submit"), data=data)
    completions = ['<tool_call>\n{"name": "describe_task", "arguments": {}}\n</tool_call>', "done"]
    reports = []
    for name in ("a", "b"):
        episode = await make_runner(ScriptedPolicy.saying(tokenizer, *completions)).run(tool_task, episode_id=name)
        reports.append(json.loads(episode.trajectories[0].turns[0].tool_results[0].output))
    assert reports[0] == reports[1] and "412" not in json.dumps(reports[0])
    assert reports[0]["data"] == {"kind": "sum", "user": {"colour": "blue"}, "rows": [{"name": "a"}, 3]} and reports[0]["id"] == task.id
    assert reports[0]["seed"] == int(tool_task.key[:8], 16) != int(replace(tool_task, id="another").key[:8], 16)
    (schema,) = [loaded.schema for loaded in load_tools([f"{__file__}:describe_task"]).values()]
    assert schema["function"]["parameters"]["properties"] == {}, "the task is not a parameter for the agent"

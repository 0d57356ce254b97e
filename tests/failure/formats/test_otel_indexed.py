"""Indexed attributes: the conversation of OpenLLMetry and OpenInference, and hostile indices."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.failure.formats import read_all
from agentrl.failure.trace import Trace
from tests.failure.formats.test_otel import export, spoken_messages

DATA = Path(__file__).parent / "data"
CHAT = json.loads((DATA / "openai.jsonl").read_text().splitlines()[0])


def flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields one attribute for each value in an object."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(f"{prefix}.{key}", item)
    elif value is not None:
        yield prefix, value


def openllmetry(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {}), "finish_reason": "stop"}


def openinference(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"tool_call": {"id": call["id"], "function": call["function"]}} for call in message.get("tool_calls", ())]
    return {"message": {**message, **({"tool_calls": calls} if calls else {})}}


def in_contents(message: dict[str, Any]) -> dict[str, Any]:
    fields = openinference(message)["message"]
    text = fields.pop("content", None)
    parts = [{"message_content": {"type": "text", "text": text}}] if text else []
    return {"message": {**fields, "contents": parts}}


Form = tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]
FORMS: dict[str, Form] = {
    "openllmetry": (
        "gen_ai.prompt",
        "gen_ai.completion",
        openllmetry,
        {"llm.request.functions": [{**t["function"], "parameters": json.dumps(t["function"]["parameters"])} for t in CHAT["tools"]]},
    ),
    "openllmetry before": ("llm.prompts", "llm.completions", openllmetry, {"gen_ai.response.model": "stub-1"}),
    "openinference": (
        "llm.input_messages",
        "llm.output_messages",
        openinference,
        {"llm.tools": [{"tool": {"json_schema": json.dumps(tool)}} for tool in CHAT["tools"]], "llm.model_name": "stub-1"},
    ),
    "openinference in parts": ("llm.input_messages", "llm.output_messages", in_contents, {"openinference.span.kind": "LLM"}),
}


def span(id: int, attributes: dict[str, Any], parent: int = 0) -> dict[str, Any]:
    values = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    return {
        "traceId": "a" * 32, "spanId": f"{id:016x}", "parentSpanId": f"{parent:016x}" if parent else "", "attributes": values,
        "startTimeUnixNano": str(id * 10), "endTimeUnixNano": str(id * 10 + 5),
    }  # fmt: skip


def spans_of(form: Form) -> Iterator[dict[str, Any]]:
    """Yields a span for each answer of the conversation, with its attributes in reverse order."""
    prompts, completions, write, extra = form
    for number, message in enumerate(CHAT["messages"]):
        if message["role"] == "assistant":
            fields = dict(flat(prompts, [write(m) for m in CHAT["messages"][:number]])) | dict(flat(completions, [write(message)]))
            for name, value in extra.items():
                fields |= dict(flat(name, value))
            yield span(number, dict(sorted(fields.items(), reverse=True)))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_real_conversation(name: str, tmp_path: Path) -> None:
    (expected, _), _ = read_all(DATA / "openai.jsonl")
    (trace,) = export(tmp_path / "a.json", *spans_of(FORMS[name]))
    assert isinstance(trace, Trace) and spoken_messages(trace) == spoken_messages(expected)
    if name in ("openllmetry", "openinference"):
        assert trace.tools == expected.tools
    if "before" in name or name == "openinference":
        assert trace.origin["model"] == "stub-1"
    gaps = [gap for gap in trace.missing if "__unparsed__" not in gap]  # the arguments of one call are broken
    assert gaps == ([] if trace.tools else ["schemas of the tools"])


def test_more_than_ten_messages_are_ordered_by_index(tmp_path: Path) -> None:
    texts = [str(number) for number in range(23)]
    attributes = dict(sorted(flat("gen_ai.prompt", [{"role": "user", "content": text} for text in texts])))
    (trace,) = export(tmp_path / "a.json", span(1, {**attributes, "gen_ai.completion.0.content": "done"}))
    assert [entry.message.content for entry in trace.spoken] == [*texts, "done"] and trace.spoken[-1].message.role == "assistant"


def test_older_forms_of_messages_are_read(tmp_path: Path) -> None:
    attributes = {
        "llm.prompts.0.user": "by its role",
        "llm.prompts.1.role": "user",
        "llm.prompts.1.content": '[{"type": "text", "text": "in parts"}]',
        "llm.prompts.2.content": "[{no parts",
        "llm.prompts.3.role": "assistant",
        "llm.prompts.3.function_call.name": "f",
        "llm.prompts.3.function_call.arguments": '{"x": 1}',
        "llm.prompts.4": "bare",
        "llm.output_messages.0.message.function_call_name": "g",
        "llm.output_messages.0.message.function_call_arguments_json": "{}",
    }
    (trace,) = export(tmp_path / "a.json", span(1, attributes))
    assert [(entry.message.role, entry.message.content) for entry in trace.spoken] == [
        ("user", "by its role"),
        ("user", "in parts"),
        ("user", "[{no parts"),
        ("assistant", ""),
        ("user", "bare"),
        ("assistant", ""),
    ]
    assert [call.name for entry in trace.spoken for call in entry.message.tool_calls] == ["f", "g"]


def test_agent_and_tool_spans_of_openinference_are_read(tmp_path: Path) -> None:
    agent = span(1, {"openinference.span.kind": "AGENT", "agent.name": "desk"})
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    request = {"llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "go", "session.id": "s-1"}
    chat = request | dict(flat("llm.output_messages", [openinference({"role": "assistant", "tool_calls": [call]})]))
    tool = {"openinference.span.kind": "TOOL", "tool.name": "f", "tool_call.id": "c", "input.value": '{"x": 1}', "output.value": "7"}
    (trace,) = export(tmp_path / "a.json", agent, span(2, chat, parent=1), span(3, tool, parent=1))
    assert [(entry.agent, entry.message.role, entry.message.content) for entry in trace.spoken] == [
        ("desk", "user", "go"),
        ("desk", "assistant", ""),
        ("desk", "tool", "7"),
    ]
    assert trace.spoken[2].answers == "c"


HOSTILE = {
    "a huge index": ({"gen_ai.prompt.999999999999.content": "x"}, "a number that is not an index"),
    "a sparse index": ({"gen_ai.prompt.999999.content": "x"}, "between those that have attributes"),
    "zeros before it": ({"gen_ai.prompt.00.content": "x"}, "a number that is not an index"),
    "other digits": ({"gen_ai.prompt.\u0663.content": "x"}, "a number that is not an index"),
    "a value and its parts": ({"gen_ai.prompt.0.content.0.text": "x", "gen_ai.prompt.0.content": "y"}, "contradict others"),
    "parts of a value": ({"gen_ai.prompt.0.content": "y", "gen_ai.prompt.0.content.0.text": "x"}, "contradict others"),
    "levels without end": ({f"gen_ai.prompt.0{'.a' * 5000}": "x"}, "nested too deep"),
    "a huge index of calls": ({"gen_ai.prompt.1.tool_calls.999999.name": "f", "gen_ai.prompt.1.tool_calls.7.name": "g"}, ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_huge_indices_cost_nothing_and_contradictions_are_gaps(name: str, tmp_path: Path) -> None:
    attributes, gap = HOSTILE[name]
    good = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "q"} if "parts" not in name else {}
    tracemalloc.start()
    (trace,) = export(tmp_path / "a.json", span(1, {**good, **attributes, "gen_ai.completion.0.content": "a"}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(trace, Trace) and peak < 64 << 20
    assert trace.spoken[-1].message.content == "a" and (not good or trace.spoken[0].message.content == "q")
    assert any(gap in missing for missing in trace.missing), trace.missing
    if "calls" in name:
        assert [call.name for call in trace.spoken[1].message.tool_calls] == ["g", "f"]


@pytest.mark.slow
def test_many_attributes_are_read_in_linear_time(tmp_path: Path) -> None:
    attributes = {f"gen_ai.prompt.{number}.content": "x" for number in range(0, 40_000, 2)}
    began = time.process_time()
    (trace,) = export(tmp_path / "a.json", span(1, attributes))
    assert len(trace.spoken) == 20_000 and time.process_time() - began < 60

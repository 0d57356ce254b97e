"""Outages are not blamed on the agent, in own episodes and in imported traces; the agent's failures are not tagged as outages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.failure import rules
from agentrl.failure.formats import read
from agentrl.failure.trace import Trace
from agentrl.failure.triage import tag_by_rules
from agentrl.records import Blame, Failure, ToolCall

from .traces import imported_trace, python, submit, task, trace, turn, utterance

OFFERED = task(tools=("mytools:search", "submit"))
CALL = ToolCall(name="search", arguments={"query": "the weather"})
OUTAGES = [
    "error: 503 upstream timeout",
    "503 Service Unavailable",
    "Error: connect ECONNREFUSED 127.0.0.1:5432",
    "error: search failed: ConnectError: All connection attempts failed",
    "httpx.ReadTimeout: ",
    "TimeoutError",
    "error: the search timed out after 30 s",
    "upstream connect error or disconnect/reset before headers",
    '{"error": {"code": 503, "message": "try again later"}}',
    '{"status": 502, "error": "Bad Gateway"}',
    "Traceback (most recent call last):\n  ...\nConnectionRefusedError: [Errno 111] Connection refused",
    "error: rate limit exceeded",
    "error: socket.gaierror: [Errno -2] Name or service not known",
    "error: context deadline exceeded",
]
AGENT_FAULTS = [
    ("read", {"path": "b.csv"}, "error: 404 Not Found"),
    ("read", {"path": "b.csv"}, "FileNotFoundError: [Errno 2] No such file or directory: 'b.csv'"),
    ("fetch", {"url": "http://127.0.0.1:1/"}, "error: Connection refused"),
    ("fetch", {"url": "https://example.org/x"}, "error: 503 Service Unavailable"),
    ("search", {"query": "connection refused"}, "error: nothing about 'connection refused'"),
    ("bash", {"command": "curl -s localhost:9"}, "curl: (7) Failed to connect to localhost port 9: Connection refused"),
    ("python", {"code": "connect()"}, "Traceback (most recent call last):\n  ...\nTimeoutError"),
    ("run_code", {"source": "x"}, "error: ConnectionRefusedError: [Errno 111] Connection refused"),
    ("judge", {"program": "while True: pass"}, "error: Time Limit Exceeded"),
    ("submit_solution", {"text": "for(;;);"}, "error: Time Limit Exceeded"),
]


def first_tag(trace: Trace) -> tuple[str, int | None]:
    tag = tag_by_rules(trace, rules.RULES)[0]
    return tag.name, tag.turn


@pytest.mark.parametrize("text", OUTAGES)
def test_an_outage_is_tagged_infrastructure_in_imported_and_own_traces(text: str) -> None:
    imported = imported_trace(utterance("assistant", "", CALL), utterance("tool", text, failed=True), utterance("assistant", "It is 3."))
    assert first_tag(imported) == ("infrastructure", 0)
    captured = trace(turn(("search", {"query": "the weather"}, text, False)), turn(submit("97")), answer="97")
    assert first_tag(captured) == ("infrastructure", 0)


@pytest.mark.parametrize("text", [text for text in OUTAGES if "deadline" not in text and "timed out" not in text])
def test_outages_are_recognized_in_formats_without_error_marks(text: str) -> None:
    assert (
        first_tag(imported_trace(utterance("assistant", "", CALL), utterance("tool", text), utterance("assistant", "It is 3.")))[0]
        == "infrastructure"
    )


@pytest.mark.parametrize(("tool", "arguments", "text"), AGENT_FAULTS)
def test_failures_of_the_agents_programs_and_addresses_are_not_outages(tool: str, arguments: dict[str, Any], text: str) -> None:
    call = ToolCall(name=tool, arguments=arguments)
    imported = imported_trace(utterance("assistant", "", call), utterance("tool", text, failed=True), utterance("assistant", "It is 3."))
    captured = trace(turn((tool, arguments, text, False)), turn(submit("97")), answer="97")
    for tested in (imported, captured):
        assert "infrastructure" not in {tag.name for tag in tag_by_rules(tested, rules.RULES)}


def test_an_outage_with_recovery_or_provoked_by_the_agent_is_not_tagged() -> None:
    down, up = ("search", {"query": "a"}, OUTAGES[0], False), ("search", {"query": "a"}, "412", True)
    assert first_tag(trace(turn(down), turn(up), turn(submit("97")), answer="97"))[0] != "infrastructure"
    provoked = Failure(stage="tool", blame=Blame.POLICY, kind="HTTPError", message="tool search: HTTPError: HTTP Error 503", turn=1)
    blamed = trace(turn(down), turn(submit("97")), answer="97", failures=(provoked,), of=OFFERED)
    assert first_tag(blamed) == ("bad_arguments", 0)
    timeout = trace(turn(python("while 1: 0", "error: timed out after 5 s", False)), turn(submit("97")), answer="97")
    assert first_tag(timeout) == ("budget", 0)


def test_a_lost_sandbox_differs_from_a_failing_program() -> None:
    for text in ("error: Cannot connect to the Docker daemon at unix:///var/run/docker.sock", "error: the container abc is not running"):
        call = ToolCall(name="bash", arguments={"command": "ls"})
        assert (
            first_tag(imported_trace(utterance("assistant", "", call), utterance("tool", text, failed=True), utterance("assistant", "3")))[
                0
            ]
            == "infrastructure"
        )


def attribute(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def span(number: int, name: str, parent: int, error: str = "", **attributes: str) -> dict[str, Any]:
    fields = [attribute(f"gen_ai.{key.replace('__', '.')}", value) for key, value in attributes.items()]
    failed = {"status": {"code": 2}} if error else {}
    return {
        "traceId": "a" * 32,
        "spanId": f"{number:016x}",
        **({"parentSpanId": f"{parent:016x}"} if parent else {}),
        "name": name,
        "startTimeUnixNano": str(number * 10**9),
        "endTimeUnixNano": str(number * 10**9 + 10**8),
        "attributes": [*fields, *([attribute("error.type", error)] if error else [])],
        **failed,
    }


def export_spans(tmp_path: Path, *spans: dict[str, Any]) -> Trace:
    (tmp_path / "spans.json").write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}))
    [imported] = read(tmp_path / "spans.json")
    assert isinstance(imported, Trace), imported
    return imported


def conversation(tool_error: str, result: str | None, *, arguments: str = '{"query": "the weather"}') -> list[dict[str, Any]]:
    question = [{"role": "user", "parts": [{"type": "text", "content": "How is the weather?"}]}]
    part = {"type": "tool_call", "id": "c1", "name": "search", "arguments": json.loads(arguments)}
    answer = [{"role": "assistant", "parts": [part]}]
    outcome: dict[str, str] = {} if result is None else {"tool__call__result": result}
    return [
        span(1, "invoke_agent", 0, operation__name="invoke_agent"),
        span(2, "chat", 1, operation__name="chat", input__messages=json.dumps(question), output__messages=json.dumps(answer)),
        span(3, "execute_tool", 1, tool_error, operation__name="execute_tool", tool__name="search", tool__call__id="c1", **outcome),
    ]


@pytest.mark.parametrize("error", ["TimeoutError", "httpx.ConnectTimeout", "ConnectionRefusedError", "503", "openai.RateLimitError"])
@pytest.mark.parametrize("result", [None, "the tool failed"])
def test_a_span_error_type_of_an_outage_is_tagged_infrastructure(error: str, result: str | None, tmp_path: Path) -> None:
    assert first_tag(export_spans(tmp_path, *conversation(error, result)))[0] == "infrastructure"


@pytest.mark.parametrize("error", ["ValueError", "404", "KeyError", "_OTHER"])
def test_other_span_error_types_are_tagged_bad_arguments(error: str, tmp_path: Path) -> None:
    assert first_tag(export_spans(tmp_path, *conversation(error, "the tool failed")))[0] == "bad_arguments"


def test_a_failed_last_model_call_is_not_blamed_on_the_agent(tmp_path: Path) -> None:
    spans = conversation("", "sunny")
    failing = span(4, "chat", 1, "APITimeoutError", operation__name="chat")
    imported = export_spans(tmp_path, *spans, failing)
    assert any("the call failed, APITimeoutError" in gap for gap in imported.missing)
    assert first_tag(imported)[0] == "infrastructure"
    assert first_tag(replace(imported, missing=()))[0] != "infrastructure"

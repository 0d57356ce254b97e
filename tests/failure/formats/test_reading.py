"""Reading files: unreadable documents have a position and a fix, within bounded time and memory, and the others are read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.failure.formats import UnreadableDocument, files, otel, read, read_all
from agentrl.failure.trace import CaptureReason, Trace
from agentrl.records import codec

DATA = Path(__file__).parent / "data"
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
AGENT = {"name": "a", "version": "1"}
ATIF: dict[str, Any] = {"schema_version": "ATIF-v1.8", "agent": AGENT, "steps": [{"step_id": 1, "source": "user", "message": "q"}]}


def unreadable(path: Path, document: Any) -> UnreadableDocument:
    """The error for a document without a trace."""
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    (error,) = read(path)
    assert isinstance(error, UnreadableDocument) and error.fix and str(error).startswith(str(path))
    return error


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.iterdir() if "silent" not in path.name))
def test_the_format_of_real_exports_is_detected(name: str) -> None:
    traces, errors = read_all(DATA / name)
    assert not errors
    for trace in traces:
        assert trace.why is CaptureReason.IMPORTED and trace.source == name.partition("_")[0].partition(".")[0] and trace.origin["file"]
        assert codec.from_json(Trace, codec.to_json(trace)) == trace


def test_all_files_of_a_folder_are_read() -> None:
    traces, errors = read_all(DATA)
    assert len({trace.id for trace in traces}) == len(traces) == 9
    assert [error.message.partition(": ")[2] for error in errors] == ["contains no message text"] * 3  # of otel_silent.jsonl
    reread, _ = read_all(DATA)
    assert reread == traces


def test_a_bad_line_does_not_lose_the_others(tmp_path: Path) -> None:
    other = {"messages": [{"role": "user", "content": "r"}]}
    lines = [
        b"{",
        json.dumps(CHAT).encode(),
        b"\xff",
        b"",
        b'{"messages": 3}',
        b'{"a": 1}',
        json.dumps(CHAT).encode(),
        json.dumps(other).encode(),
    ]
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n".join(lines))
    items = list(read(path))
    assert [item.origin["place"] for item in items if isinstance(item, Trace)] == ["line 2", "line 8"]
    texts = {item.position: item.message.partition(": ")[2] for item in items if isinstance(item, UnreadableDocument)}
    assert list(texts) == ["line 1", "line 3", "line 5", "line 6", "line 7"]
    assert "not JSON" in texts["line 1"] and "UTF-8" in texts["line 3"] and "not a list" in texts["line 5"]
    assert texts["line 6"] == "has no known format: it is an object with 'a'" and texts["line 7"] == "is the same as some.jsonl, line 2"
    path.rename(tmp_path / "some.json")  # a file of lines that is named otherwise, and whose first line is broken
    (tmp_path / "some.json").write_bytes(b"{3}\n" + b"\n".join(lines))
    assert sum(isinstance(item, Trace) for item in read(tmp_path / "some.json")) == 2


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**ATIF, "schema_version": "ATIF-v2.0"}, r"'ATIF-v2\.0'; supported versions are ATIF-v1\.0 to"),
        ({**ATIF, "schema_version": "ATIF-v1.9"}, "supported versions are"),
        ({**ATIF, "schema_version": None}, "has no schema_version"),
        ({**ATIF, "steps": []}, "has no steps"),
        ({**ATIF, "steps": {}}, "steps is an object, not a list"),
        ({**ATIF, "steps": [{"step_id": 1, "source": "robot", "message": ""}]}, "step 1: source"),
        ({**ATIF, "steps": [{"step_id": 1, "source": "user", "message": 3}]}, "step 1: message is a number"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\].content is an object"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": None}}]}], "has no valid function name"),
        ([{"role": "\u202e", "content": ""}], "role"),
        ([{"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"}], "Responses API"),
        ({"name": "chat", "context": {"trace_id": "0x1"}}, "console exporter"),
        ("[" * 200_000, "nested too deep"),
        ('{"messages": ' + "9" * 5000 + "}", "integer"),
        ("", "is empty"),
        ("3", "no known format"),
        ('"\x1b[2J\u202e"', "is not JSON"),
    ],
)
def test_an_unreadable_document_has_a_reason(document: Any, message: str, tmp_path: Path) -> None:
    error = unreadable(tmp_path / "one.json", document)
    assert re.search(message, error.message), error.message
    assert all(letter.isprintable() for letter in error.message)


def test_sizes_are_bounded_before_anything_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST", 1000)
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([json.dumps(CHAT), '{"messages": "' + "x" * 5000 + '"}', json.dumps(CHAT["messages"][:1])]))
    first, long, last = read(path)
    assert isinstance(first, Trace) and isinstance(last, Trace)
    assert isinstance(long, UnreadableDocument) and long.position == "line 2" and "longer than" in long.message
    monkeypatch.setattr(files, "LARGEST", 1 << 20)
    monkeypatch.setattr(files, "LARGEST_IN_MEMORY", 1 << 20)
    assert "too many values" in unreadable(tmp_path / "bomb.json", "[" + "{}," * 200_000 + "{}]").message


def test_too_many_spans_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "MOST_SPANS", 1000)
    span = {"traceId": "a" * 32, "parentSpanId": "", "name": "GET"}
    spans = [{**span, "spanId": f"{number:016x}"} for number in range(400)]
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join([line] * 5))
    with pytest.raises(UserError, match=r"more than 1000 spans") as raised:
        list(read(path))
    assert raised.value.fix


def test_an_unreadable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "none.json")
    with pytest.raises(UserError, match="contains no files"):
        list(read(tmp_path))
    with pytest.raises(UserError, match="unknown format 'xml'"):
        read(DATA, "xml")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="contains no files"):  # neither waited for nor followed
        list(read(tmp_path))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UserError, match=r"a\.json: has no known format"):
        read_all(tmp_path)
    with pytest.raises(UserError, match="has no known format"):
        read_all(DATA / "openai.jsonl", "atif")

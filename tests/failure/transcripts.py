"""Transcripts as models write them, each with the first failure that a reader labelled: (tag, turn, trace).

`data/transcripts.jsonl` has one episode per line. The episodes after line 72 and those of third-party agents were written after the rules.
Loops start at the first repetition, and an exceeded budget at the turn that exceeds it.
Two transcripts are beyond rules that do not understand text: a web search for the content of a file, and the wrong one of two names in
a table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.failure.trace import ImportedMessage, Trace
from agentrl.records import Blame, Failure, ToolCall

from .traces import imported_trace, task, trace, turn, utterance

Labelled = tuple[str, int | None, Trace]
DATA = Path(__file__).parent / "data" / "transcripts.jsonl"
SEARCH = ToolCall(name="search", arguments={"q": "rows of a.csv"})
SEARCH_TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}},
}


def labelled() -> list[Labelled]:
    """Returns all transcripts: those of this project's episodes, then those of third-party agents."""
    return [*map(_episode, DATA.read_text(encoding="utf-8").splitlines()), *_imported()]


def _episode(line: str) -> Labelled:
    fields: dict[str, Any] = json.loads(line)
    tag, at, turns = (fields.pop(name) for name in ("tag", "at", "turns"))
    if (task_fields := fields.pop("task", None)) is not None:
        fields["of"] = task(**{key: tuple(value) if isinstance(value, list) else value for key, value in task_fields.items()})
    if failures := fields.pop("failures", ()):
        fields["failures"] = tuple(Failure(**{**failure, "blame": Blame(failure["blame"])}) for failure in failures)
    return tag, at, trace(*(_turn(**turn_fields) for turn_fields in turns), **fields)


def _turn(calls: list[list[Any]] | None = None, malformed: tuple[str, ...] = (), **fields: Any) -> Any:
    return turn(*((name, arguments, output, ok) for name, arguments, output, ok in calls or []), malformed=tuple(malformed), **fields)


def _imported() -> list[Labelled]:
    def search_exchange(output: str, last: str, call: ToolCall = SEARCH, **result: Any) -> tuple[ImportedMessage, ...]:
        answer = utterance("tool", output, answers="c1", **result)
        return utterance("assistant", "", call, call_ids=("c1",)), answer, utterance("assistant", last)

    read_file = ToolCall(name="read_file", arguments={"path": "a.csv"})
    without_q = ToolCall(name="search", arguments={"query": "a.csv"})
    repeats = [
        (utterance("assistant", "", SEARCH, call_ids=(f"c{n}",)), utterance("tool", "no results", answers=f"c{n}")) for n in range(6)
    ]
    transcripts: list[tuple[str, int, tuple[ImportedMessage, ...]]] = [
        ("wrong_tool", 0, search_exchange("Error: tool read_file not found", "I cannot read it.", read_file, failed=True)),
        ("bad_arguments", 0, search_exchange("Missing required parameter: q", "It has 3 rows.", without_q, failed=True)),
        ("gave_up", 0, (utterance("assistant", "I'm unable to access that file."),)),
        ("looped", 1, tuple(message for pair in repeats for message in pair)),
        ("bad_arguments", 0, search_exchange('{"error": "invalid query syntax"}', "It has 3 rows.")),
        ("infrastructure", 0, search_exchange("503 Service Unavailable", "The search service is down, sorry.", failed=True)),
    ]
    return [(tag, at, imported_trace(*messages, tools=(SEARCH_TOOL,))) for tag, at, messages in transcripts]

"""`agentrl failures` on a collection from real capture, and on hostile traces."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.failures import failures_app
from agentrl.config.gate import CaptureConfig
from agentrl.errors import UserError
from agentrl.failure import Capture
from agentrl.failure.case import load_suite
from agentrl.failure.collection import Collection, TraceFilter, TraceRow
from agentrl.failure.trace import CaptureReason, ImportedMessage, Tag, Trace
from agentrl.records import Group, Message, Score, ToolCall
from tests.failure.traces import imported_trace, python, scored, submit, task, trace, turn, utterance

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x00\u202egnp.exe\r\b\x9b31m"


def call(*arguments: str, wrong: bool = False) -> str:
    result = CliRunner().invoke(failures_app, list(arguments))
    if wrong:
        assert isinstance(result.exception, UserError) or result.exit_code == 2, result.output
        return str(result.exception)
    assert result.exit_code == 0, f"{result.output}{result.exception!r}"
    return result.stdout if "--json" in arguments else result.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three groups with a misread answer, an unknown tool and a fault, and one attempt that passed."""
    folder = tmp_path / "quick"
    capture = Capture(folder, CaptureConfig(), origin={"run": "quick"})
    first_turn = turn(python("print(sum)", "412"))
    misread = scored(first_turn, turn(submit("421")), answer="421", name="g000000-0-a0")
    passed = scored(first_turn, turn(submit("412")), answer="412", value=1.0, name="g000000-1-a0")
    strange = turn(("search", {"q": "x"}, "error: no tool 'search'; tools: python, submit", False), version=4)
    wrong = scored(strange, turn(submit("1")), answer="1", name="g000001-0-a0", of=task("What is the mean?"))
    fault = scored(first_turn, value=None, name="g000002-0-a0")
    for index, (item, episodes) in enumerate(((task(), (misread, passed)), (task("What is the mean?"), (wrong,)), (task(), (fault,)))):
        capture.capture_group(item, Group(index=index, task_id="t", task_key=item.key, episodes=episodes), step=index)
    capture.close()
    assert capture.lost == 0
    return folder


def test_list_counts_and_filters(run: Path) -> None:
    output = call("list", str(run))
    assert "3 failures in 4 episodes" in output and "misread_output 1" in output and "version, in training: 3 2  4 1" in output
    listed = json.loads(call("list", str(run), "--tag", "wrong_tool", "--version", "4", "--kind", "sum", "--phase", "train", "--json"))
    assert [row["id"] for row in listed["traces"]] == ["g000001-0-a0"] and listed["tags"]["misread_output"] == 1
    assert json.loads(call("list", str(run), "--why", "limit", "--json"))["traces"] == []
    assert "no trace matches the filters; the counts above cover 3 failures" in call("list", str(run), "--tag", "misspelled")
    assert "no trace matches" not in output
    assert call("export", str(run), str(run / "one.jsonl"), "g000000-0-a0") == f"1 document in {run / 'one.jsonl'}\n"


def test_a_truncated_list_is_marked(run: Path) -> None:
    assert "newest" not in call("list", str(run))
    output = call("list", str(run), "--most", "2")
    assert "the newest 2 of 3 traces; to list all: --most 3" in output and "g000000-0-a0" not in output and "g000002-0-a0" in output
    assert "the newest 0 of 1 trace;" in call("list", str(run), "--most", "0", "--tag", "wrong_tool")
    listed = json.loads(call("list", str(run), "--most", "2", "--json"))
    assert (len(listed["traces"]), listed["matching"]) == (2, 3)


def test_a_list_reads_no_more_than_it_shows(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, bounds = Collection.rows, list[int]()

    def bounded(self: Collection, trace_filter: TraceFilter | None = None, *, most: int = -1, newest: bool = False) -> list[TraceRow]:
        bounds.append(most)
        return rows(self, trace_filter, most=most, newest=newest)

    monkeypatch.setattr(Collection, "rows", bounded)
    call("list", str(run), "--most", "2")
    assert 2 in bounds and -1 not in bounds


def test_show_marks_the_failing_turn(run: Path) -> None:
    lines = call("show", str(run), "g000000-0-a0").splitlines()
    assert [line for line in lines if line.startswith(">>")] == [">> turn 2"]
    text = "\n".join(lines)
    texts = ("What is the total of `amount`?", "print(sum)", "412", "answer  421", "truth   412", "score   0", "misread_output at turn 2")
    assert not [expected for expected in texts if expected not in text]
    assert json.loads(call("show", str(run), "g000000-0-a0", "--json"))["episode"]["answer"] == "421"
    assert "has no trace 'x'" in call("show", str(run), "x", wrong=True)


def test_a_user_and_rules_tag_failures(run: Path, tmp_path: Path) -> None:
    call("tag", str(run), "g000000-0-a0", "--as", "wrong_unit", "--turn", "1", "--note", "cents")
    assert "wrong_unit 1" in call("list", str(run)) and "cents" in call("show", str(run), "g000000-0-a0")
    assert "wrong_unit at turn 1 " in call("show", str(run), "g000000-0-a0"), "the turn as typed"
    rows = json.loads((run / "failures" / "failures.json").read_text())["examples"]
    assert [(row["tag"], row["turn"], row["note"]) for row in rows if row["trace"] == "g000000-0-a0"] == [("wrong_unit", 0, "cents")]
    rules = tmp_path / "mine.py"
    rules.write_text(
        "from agentrl.failure.trace import Tag\n"
        "def all_odd(trace):\n    return Tag(name='odd', by='me', turn=0) if trace.why == 'failed' else None\n"
    )
    tags = json.loads(call("tag", str(run), "--rules", f"{rules}:all_odd", "--json"))
    assert tags == {"g000000-0-a0": "odd", "g000001-0-a0": "odd", "g000002-0-a0": "infrastructure"}
    listed = json.loads(call("list", str(run), "--json"))
    assert listed["tags"] == {"infrastructure": 1, "odd": 1, "wrong_unit": 1}, "a tag from a user stays"
    assert json.loads((run / "failures" / "failures.json").read_text())["tags"] == listed["tags"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tag", "{run}", "--as", "looped"), "needs trace ids"),
        (("tag", "{run}", "g000000-0-a0", "--as", "Not A Tag"), "is not a valid tag"),
        (("tag", "{run}", "g000000-0-a0", "--turn", "1"), "--as NAME"),
        (("tag", "{run}", "absent"), "has no trace absent"),
        (("promote", "{run}", "--into", "{run}/s"), "no traces are selected"),
        (("promote", "{run}", "absent", "--into", "{run}/s"), "has no trace absent"),
        (("promote", "{run}", "g000002-0-a0", "--into", "{run}/s"), "records a fault"),
        (("promote", "{run}", "--tag", "infrastructure", "--into", "{run}/s"), "can become a case: 1 ended in a fault"),
        (("promote", "{run}", "--tag", "looped", "--into", "{run}/s"), "no trace that matches these filters"),
        (("promote", "{run}", "g000000-0-a0", "--into", "{run}/s", "--threshold", "nan"), "--threshold nan"),
        (("list", "{run}/failures"), "no captured failures"),
        (("list", "{run}/nowhere"), "no folder"),
    ],
)
def test_wrong_use_is_reported_with_a_fix(run: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in call(*(argument.format(run=run) for argument in arguments), wrong=True)
    assert not (run / "s").exists()


def test_promote_creates_a_suite_and_adds_no_task_twice(run: Path, tmp_path: Path) -> None:
    suite = tmp_path / "evals" / "reading"
    first = call("promote", str(run), "--phase", "train", "--most", "10", "--into", str(suite), "--note", "first")
    assert "2 new cases" in first and "tasks.withhold" in first
    cases = load_suite(suite).cases
    assert {case.trace for case in cases} == {"quick:g000000-0-a0", "quick:g000001-0-a0"} and {case.note for case in cases} == {"first"}
    second = json.loads(call("promote", str(run), "g000000-0-a0", "--into", str(suite), "--json"))
    assert [(case["likeness"], case["path"]) for case in second] == [("same", None)]


@pytest.mark.slow
def test_clusters_contain_every_trace(run: Path) -> None:
    clusters = json.loads(call("cluster", str(run), "--json"))
    assert sorted(name for cluster in clusters for name in cluster["ids"]) == ["g000000-0-a0", "g000001-0-a0", "g000002-0-a0"]
    assert "wrong_tool 1" in call("cluster", str(run), "--tag", "wrong_tool")


def test_third_party_traces_are_imported_tagged_and_exported(run: Path, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "How many rows?"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "cout", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "error: no such tool"},
        {"role": "assistant", "content": "I cannot do that."},
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat}) + "\n" + HOSTILE + "\n")
    into = tmp_path / "support"
    assert json.loads(call("import", str(into), str(file), "--json")) == {"stored": 1, "excluded": 1}
    (row,) = json.loads(call("list", str(into), "--json"))["traces"]
    assert (row["why"], row["phase"], row["question"]) == ("imported", "imported", "How many rows?")
    assert row["tag"] == "wrong_tool", "no format marks this answer as an error, but its text does"
    assert "no such tool" in call("show", str(into), row["id"])
    assert call("import", str(into), str(file)) and len(json.loads(call("list", str(into), "--json"))["traces"]) == 1, "once"
    assert "contains no task" in call("promote", str(into), row["id"], "--into", str(tmp_path / "s"), wrong=True)
    selected = call("promote", str(into), "--tag", "wrong_tool", "--into", str(tmp_path / "s"), wrong=True)
    assert "none of 1 trace that these filters select can become a case: 1 have no task" in selected, selected
    out = tmp_path / "out.jsonl"
    assert json.loads(call("export", str(run), str(out), "--tag", "misread_output", "--json")) == {"documents": 1}
    assert "421" in out.read_text()
    back = tmp_path / "back"
    assert json.loads(call("import", str(back), str(out), "--format", "atif", "--json"))["stored"] == 1


def hostile() -> list[Trace]:
    """Hostile traces: control characters everywhere, huge and empty texts, missing parts."""
    nasty: Any = {HOSTILE: HOSTILE, "deep": [[[[HOSTILE] * 50] * 3]]}
    steps = tuple(turn((HOSTILE, nasty, HOSTILE * 700, False), said=HOSTILE * 700, malformed=(HOSTILE,) * 90) for _ in range(8))
    hostile_task = task(HOSTILE * 5000, truth=HOSTILE, data={"kind": HOSTILE, "answer": HOSTILE}, id=f"t{HOSTILE}")
    complete = trace(*steps, of=hostile_task, answer=HOSTILE * 100, ended=HOSTILE, name="a" + HOSTILE)
    score = Score(value=0.0, evidence=HOSTILE * 500, parts={HOSTILE: 0.0})
    tags = (Tag(name=HOSTILE, by=HOSTILE, note=HOSTILE * 50, turn=10**9, trajectory=10**9),)
    messages = [utterance(HOSTILE, HOSTILE), utterance("tool", HOSTILE, answers=HOSTILE, failed=True)]
    messages += [utterance("assistant", "", ToolCall(name=HOSTILE, arguments=nasty))]
    return [
        replace(complete, score=score, tags=tags, phase=HOSTILE, origin={HOSTILE: HOSTILE}, missing=(HOSTILE,) * 99),
        replace(imported_trace(*messages * 60), id="b", phase=HOSTILE),
        Trace(id="c", why=CaptureReason.IMPORTED, phase="imported"),
        Trace(
            id="d",
            why=CaptureReason.IMPORTED,
            spoken=(ImportedMessage(message=Message(role="", content=""), agent=HOSTILE),),
            tools=({}, {"name": 3}, nasty),
        ),
        trace(name="e"),
    ]


@pytest.mark.slow
def test_hostile_traces_break_no_command_and_print_no_control_characters(tmp_path: Path) -> None:
    with Collection(tmp_path, make=True) as collection:
        collection.add(hostile())
        ids = [row.id for row in collection.rows()]
    assert len(ids) == 5
    outputs = [call(name, str(tmp_path)) for name in ("list", "tag", "list", "cluster")]
    outputs += [call("show", str(tmp_path), trace_id) for trace_id in ids]
    assert not [text for text in outputs if CONTROL.search(text)], "no characters that move a cursor or reverse text"
    assert all(len(text) < 200_000 for text in outputs)
    with Collection(tmp_path) as collection:
        assert all(row.tag for row in collection.rows()), "every trace has a tag"

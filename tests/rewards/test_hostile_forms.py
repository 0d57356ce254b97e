"""JSON, files and tool use from a hostile policy: wrong ones score 0, right ones 1."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.records import Blame, Episode, Failure, Message, Parent, ToolCall, ToolResult, Trajectory, Turn
from rewards.json_schema import JsonSchema
from rewards.outputs import outputs
from rewards.tool_use import ToolUse
from tests.judging import episode, judged, task, value

ORDER = {
    "type": "object",
    "required": ["id", "city", "day"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "city": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
        "day": {"type": "string", "format": "date"},
        "mail": {"type": "string", "format": "email"},
        "at": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "maxItems": 3},
    },
}
GOOD: dict[str, Any] = {"id": 12345678901234567891, "city": "Rome", "day": "2024-02-29"}


def with_(**changes: Any) -> str:
    return json.dumps(GOOD | changes)


RIGHT = [
    with_(),
    json.dumps(GOOD, indent=2),
    json.dumps(dict(reversed(GOOD.items()))),
    with_().replace("Rome", "\\u0052ome"),
    with_(id=1.0),
    with_(id=7).replace("7", "7e0"),
    with_(mail="a@b"),
    with_(at="2024-02-29T23:59:59Z"),
    with_(at="2024-02-29t00:00:00.123+01:00"),
    with_(tags=["a", 1]),
    "\ufeff" + with_(),
]
WRONG = [
    "",
    "null",
    "true",
    "{}",
    "[]",
    json.dumps([GOOD]),
    json.dumps(with_()),
    with_() + with_(),
    with_() + ",",
    with_()[:-1],
    with_()[:-1] + ",}",
    with_().replace('"', "'"),
    f"```json\n{with_()}\n```",
    f"Here it is: {with_()}",
    f"{with_()} // done",
    with_()[:-1] + ', "id": 1}',
    with_()[:-1] + ', "city": "Rome"}',
    with_(extra=1),
    with_(id=True),
    with_(id="1"),
    with_(id=1.5),
    with_(id=0),
    with_(id=None),
    with_(id=7).replace("7", "NaN"),
    with_(id=7).replace("7", "Infinity"),
    with_(id=7).replace("7", "1e999"),
    with_(id=7).replace("7", "07"),
    with_(id=7).replace("7", "+7"),
    with_(id=7).replace("7", "\u0667"),
    with_(city="Rome\n"),
    with_(city="rome"),
    with_(city=["Rome"]),
    with_(city=""),
    with_(city="Rome\u0000"),
    with_(day="2024-02-30"),
    with_(day="29.02.2024"),
    with_(day="not a day"),
    with_(day="2024-02-29\n"),
    with_(day=20240229),
    with_(mail="nobody"),
    with_(mail="@"),
    with_(mail="a b@c"),
    with_(at="2024-02-29"),
    with_(at="2024-02-30T00:00:00Z"),
    with_(at="2024-02-29T25:00:00Z"),
    with_(at="2024-02-29 00:00:00Z"),
    with_(at="2024-02-29T00:00:00"),
    with_(tags=["a", "a"]),
    with_(tags=["c"]),
    with_(tags=[True]),
    with_(tags=["1"]),
    with_(tags="a"),
    with_(tags={"0": "a"}),
    '{"$ref": "#"}',
    '{"$schema": true}',
    "[" * 5000 + "]" * 5000,
    '{"id": ' * 2000 + "1" + "}" * 2000,
    '{"id": ' + "9" * 50_000 + "}",
    "\x00" + with_(),
]


async def test_json_is_right_if_it_fits() -> None:
    assert [answer for answer in RIGHT if await value(JsonSchema(schema=ORDER), answer) != 1.0] == []
    assert [answer for answer in WRONG if await value(JsonSchema(schema=ORDER), answer) != 0.0] == []


TRUTH = {"id": 12345678901234567891, "share": 0.1, "names": ["a", "b"], "done": False, "note": None, "in": {"x": 1}}
UNEQUAL: list[dict[str, Any]] = [
    {"id": 12345678901234567890},
    {"id": 1.2345678901234567e19},
    {"id": "12345678901234567891"},
    {"share": 0.1000001},
    {"share": "0.1"},
    {"names": ["b", "a"]},
    {"names": ["a"]},
    {"names": ["a", "b", "b"]},
    {"names": ["a", "B"]},
    {"names": {"0": "a", "1": "b"}},
    {"done": 0},
    {"done": None},
    {"done": "false"},
    {"note": ""},
    {"note": False},
    {"in": {"x": True}},
    {"in": {"x": 1, "y": 2}},
    {"in": {}},
    {"more": 1},
]


@pytest.mark.parametrize("changed", UNEQUAL, ids=str)
async def test_json_that_differs_from_the_truth(changed: dict[str, Any]) -> None:
    verifier = JsonSchema(schema={"type": "object"}, equal=True)
    assert await value(verifier, json.dumps(TRUTH), answer=TRUTH) == 1.0
    assert await value(verifier, json.dumps(TRUTH | changed), answer=TRUTH) == 0.0
    collected = {"out.json": json.dumps(TRUTH | changed).encode()}
    files = task(answer={"out.json": {"json": TRUTH}}, outputs=("out.json",))
    assert (await judged(outputs, files, episode(**collected))).value == 0.0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "uri"},
        {"type": "string", "format": "nonsense"},
        {"properties": {"a": {"items": {"format": "hostname"}}}},
        {"anyOf": [{"type": "integer"}, {"format": "nonsense"}]},
        {"$defs": {"x": {"format": "nonsense"}}},
    ],
)
async def test_unknown_format_is_a_task_fault(schema: dict[str, Any]) -> None:
    """Whatever the answer is: else an agent could choose which of its answers count."""
    for answer in ('"x"', "1", "{"):
        score = await judged(JsonSchema(schema=schema), task(), episode(answer))
        assert score.value is None and score.blame is Blame.TASK, score


async def test_property_with_the_name_format_is_not_a_format() -> None:
    schema = {"properties": {"format": {"type": "string"}}, "enum": [{"format": "pdf"}], "default": {"format": "x"}}
    assert await value(JsonSchema(schema=schema), '{"format": "pdf"}') == 1.0
    assert await value(JsonSchema(schema=schema), '{"format": "x"}') == 0.0


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("^a$", "a", 1.0),
        ("^a$", "a\n", 0.0),
        ("^\\$$", "$", 1.0),
        ("^[$]$", "$", 1.0),
        ("^[$]$", "$\n", 0.0),
        ("^[^$]+$", "ab", 1.0),
        ("^[]$]$", "]", 1.0),
        ("^(a|b$)", "b\n", 0.0),
        ("^\\d+$", "\u0661", 0.0),
        ("^\\w+$", "\u00e4", 0.0),
        ("b", "abc", 1.0),
    ],
)
async def test_patterns_are_those_of_ecmascript(pattern: str, text: str, expected: float) -> None:
    assert await value(JsonSchema(schema={"type": "string", "pattern": pattern}), json.dumps(text)) == expected


TABLE = "city,total\nRome,2.50\nOslo,1\n"
FILES: list[tuple[str, Any, bytes | None, float]] = [  # kind, truth, content of the output, expected score
    ("text", "one\ntwo\n", b"one\ntwo", 1.0),
    ("text", "one\ntwo\n", b"\xef\xbb\xbfone\r\ntwo\r\n\r\n", 1.0),
    ("text", "one\ntwo\n", b"one \ntwo", 0.0),
    ("text", "one\ntwo\n", b" one\ntwo", 0.0),
    ("text", "one\ntwo\n", b"one\n\ntwo", 0.0),
    ("text", "one\ntwo\n", b"one\ntwo\nthree", 0.0),
    ("text", "one\ntwo\n", b"one\ntwo\x00", 0.0),
    ("text", "one\ntwo\n", b"two\none", 0.0),
    ("text", "one\ntwo\n", "one\ntwo".encode("utf-16"), 0.0),
    ("text", "one\ntwo\n", b"", 0.0),
    ("text", "one\ntwo\n", None, 0.0),
    ("table", TABLE, b"total,city\n1.0,Oslo\n2.5,Rome\n", 1.0),
    ("table", TABLE, b'"city","total"\n"Rome"," 2.50 "\nOslo,1e0\n', 1.0),
    ("table", TABLE, b"city,total\nRome,2.50\n", 0.0),
    ("table", TABLE, b"city,total\nRome,2.50\nOslo,1\nOslo,1\n", 0.0),
    ("table", TABLE, b"city,total\nRome,2.50\nRome,2.50\n", 0.0),
    ("table", TABLE, b"city,total\nRome,1\nOslo,2.50\n", 0.0),
    ("table", TABLE, b"city,total,x\nRome,2.50,1\nOslo,1,1\n", 0.0),
    ("table", TABLE, b"city,Total\nRome,2.50\nOslo,1\n", 0.0),
    ("table", TABLE, b"city,total,city\nRome,2.50,Oslo\nOslo,1,Rome\n", 0.0),
    ("table", TABLE, b"Rome,2.50\nOslo,1\n", 0.0),
    ("table", TABLE, b"city;total\nRome;2.50\nOslo;1\n", 0.0),
    ("table", TABLE, b"city,total\nrome,2.50\nOslo,1\n", 0.0),
    ("table", TABLE, b"city,total\nRome,2.50\nOslo,1.4\n", 0.0),
    ("table", TABLE, b"city,total\nRome,2.5001\nOslo,1\n", 0.0),
    ("table", TABLE, b"city,total\nRome,2.50 EUR\nOslo,1\n", 0.0),
    ("table", TABLE, b"city,total\nRome,inf\nOslo,nan\n", 0.0),
    ("table", TABLE, b"city,total\nRome,\nOslo,\n", 0.0),
    ("table", TABLE, b'city,total\n"Rome,2.50\nOslo,1\n', 0.0),
    ("table", TABLE, b"city,total\nRome,2.50\nOslo,1\n" + b",\n" * 1000, 0.0),
    ("table", TABLE, json.dumps([{"city": "Rome", "total": 2.5}]).encode(), 0.0),
    ("has", {"door": "open"}, b'{"door": "open", "light": 1}', 1.0),
    ("has", {"door": "open"}, b'{"door": ["open", "shut"]}', 0.0),
    ("has", {"door": "open"}, b'[{"door": "open"}]', 0.0),
    ("has", {"door": "open"}, b'{"doors": {"door": "open"}}', 0.0),
    ("has", {"door": "open"}, b'{"door": "shut", "door": "open"}', 0.0),
    ("has", [{"id": 1}], b'[{"id": 1, "x": 2}]', 1.0),
    ("has", [{"id": 1}], b'[{"id": 1}, {"id": 2}]', 0.0),
    ("has", [{"id": 1}], b'[{"id": true}]', 0.0),
    ("absent", True, None, 1.0),
    ("absent", True, b"", 0.0),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "truth", "content", "expected"), FILES)
async def test_files_of_every_kind(kind: str, truth: Any, content: bytes | None, expected: float) -> None:
    file_task = task(answer={"out": {kind: truth}}, outputs=("out",))
    assert (await judged(outputs, file_task, episode(**({} if content is None else {"out": content})))).value == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("out: it is a folder", 0.0),
        ("other: it is a link; out: it is a link", 0.0),
        ("**: the working directory cannot be listed: the output is not JSON", 0.0),
        ("x: a link; " * 300, 0.0),
        ("other: it is a link", 1.0),
    ],
)
async def test_uncollected_file_is_not_absent(message: str, expected: float) -> None:
    """An agent may put a link, a folder or a pipe in place of the file that it had to delete."""
    failure = Failure(stage="collect", blame=Blame.POLICY, kind="outputs_refused", message=message[:2000])
    file_task = task(answer={"out": {"absent": True}}, outputs=("out", "**"))
    attempt = Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=None, failures=(failure,))
    assert (await judged(outputs, file_task, attempt)).value == expected


async def test_no_file_is_absent_after_a_timeout() -> None:
    line = Trajectory(agent="main", turns=(), stop_reason="wall_limit")
    file_task = task(answer={"out": {"absent": True}}, outputs=("out",))
    attempt = Episode(id="e", task_id="t", task_key="k", trajectories=(line,), answer=None)
    assert (await judged(outputs, file_task, attempt)).value == 0.0


@pytest.mark.parametrize(
    ("truth", "patterns"), [({"text": "x"}, ("other",)), ({"absent": True}, ("*",)), ({"absent": True}, ()), ({"absent": False}, ("out",))]
)
async def test_truth_of_an_undeclared_output_is_a_task_fault(truth: Any, patterns: tuple[str, ...]) -> None:
    score = await judged(outputs, task(answer={"out": truth}, outputs=patterns), episode())
    assert score.value is None and score.blame is Blame.TASK


CAREFUL = ToolUse(must=("search",), never=("shell",), at_most={"python": 2}, calls=5, order=("search", "submit"), succeeded=True)
USES: list[tuple[str, tuple[str, ...], float]] = [  # calls, tools that failed, expected score
    ("search submit", (), 1.0),
    ("search python python submit", (), 1.0),
    ("search search submit", (), 1.0),
    ("python search submit", (), 1.0),
    ("submit search", (), 0.0),
    ("submit", (), 0.0),
    ("search", (), 0.0),
    ("python", (), 0.0),
    ("Search submit", (), 0.0),
    ("SEARCH submit", (), 0.0),
    ("search_ submit", (), 0.0),
    ("mcp:search submit", (), 0.0),
    ("research submit", (), 0.0),
    ("s\u0435arch submit", (), 0.0),
    ("search submit", ("search",), 0.0),
    ("search submit", ("submit",), 0.0),
    ("search shell submit", (), 0.0),
    ("search shell submit", ("shell",), 0.0),
    ("search submit shell", (), 0.0),
    ("shell search submit", (), 0.0),
    ("search python python python submit", (), 0.0),
    ("search python python python submit", ("python",), 0.0),
    ("search a b c d submit", (), 0.0),
    ("search search search search search submit", (), 0.0),
    ("search submit submit submit submit submit", (), 0.0),
    ("submit search submit", (), 0.0),
    ("submit search submit", ("submit",), 0.0),
]


@pytest.mark.parametrize(("calls", "failed", "expected"), USES)
async def test_tool_rules(calls: str, failed: tuple[str, ...], expected: float) -> None:
    assert (await judged(CAREFUL, task(), episode(calls=calls, failed=failed))).value == expected


def act(*calls: str, ok: bool = True) -> Turn:
    return Turn(
        prompt_ids=(),
        completion_ids=(),
        logprobs=(),
        versions=(),
        message=Message(role="assistant", content="search search", tool_calls=tuple(ToolCall(name=name, arguments={}) for name in calls)),
        finish_reason="stop",
        tool_results=tuple(ToolResult(name=name, output="", ok=ok) for name in calls),
    )


def line(*turns: Turn, parent: Parent | None = None) -> Trajectory:
    return Trajectory(agent="sub" if parent else "main", turns=turns, parent=parent)


FIRST = Parent(trajectory=0, turn=0, call=0)
TREES: list[tuple[ToolUse, tuple[Trajectory, ...], float]] = [
    (ToolUse(order=("search", "submit")), (line(act("delegate"), act("submit")), line(act("search"), parent=FIRST)), 1.0),
    (ToolUse(order=("submit", "search")), (line(act("delegate"), act("submit")), line(act("search"), parent=FIRST)), 0.0),
    (
        ToolUse(order=("search", "submit")),
        (line(act("submit", "delegate")), line(act("search"), parent=Parent(trajectory=0, turn=0, call=1))),
        0.0,
    ),
    (
        ToolUse(order=("a", "b")),
        (line(act("x", "b")), line(act("y"), parent=FIRST), line(act("a"), parent=Parent(trajectory=1, turn=0, call=0))),
        1.0,
    ),
    (ToolUse(order=("a", "b")), (line(act("a")), line(act("b"), parent=Parent(trajectory=0, turn=0))), 1.0),
    (ToolUse(never=("shell",)), (line(act("delegate")), line(act("shell"), parent=FIRST)), 0.0),
    (ToolUse(at_most={"python": 1}), (line(act("python")), line(act("python"), parent=FIRST)), 0.0),
    (ToolUse(calls=2), (line(act("a", "b")), line(act("c"), parent=FIRST)), 0.0),
    (ToolUse(must=("search",), succeeded=True), (line(act("delegate")), line(act("search", ok=False), parent=FIRST)), 0.0),
    (ToolUse(must=("search",)), (line(act()),), 0.0),
]


@pytest.mark.parametrize(("rules", "lines", "expected"), TREES)
async def test_calls_of_sub_agents_count_in_their_order(rules: ToolUse, lines: tuple[Trajectory, ...], expected: float) -> None:
    attempt = Episode(id="e", task_id="t", task_key="k", trajectories=lines, answer="x")
    assert (await judged(rules, task(), attempt)).value == expected


@pytest.mark.parametrize(
    ("divisor", "number", "expected"),
    [(0.01, "19.99", 1.0), (0.1, "0.3", 1.0), (0.01, "19.995", 0.0), (0.5, "1" + "0" * 400, 1.0), (3, "10", 0.0), (1e-300, "1e300", 1.0)],
)
async def test_multiples_are_computed_on_decimal_numbers(divisor: float, number: str, expected: float) -> None:
    assert await value(JsonSchema(schema={"multipleOf": divisor}), number) == expected


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("^[0-9]+$", "12", 1.0),
        ("^[0-9]+$", "12\n", 0.0),
        (r"^\d+$", "12", 1.0),
        (r"^\d+$", "\u0661", 0.0),
        ("(?i)^a$", "A", 1.0),
        ("(?i)^a$", "A\n", 0.0),
        ("^[$]$", "$", 1.0),
    ],
)
async def test_patterns_of_property_names_are_interpreted_as_in_ecmascript(pattern: str, name: str, expected: float) -> None:
    schema = {"patternProperties": {pattern: {"type": "integer"}, "^other$": {}}, "additionalProperties": False}
    schema = {"type": "array", "items": schema}
    assert await value(JsonSchema(schema=schema), json.dumps([{name: 1}])) == expected

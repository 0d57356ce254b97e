"""Every shipped verifier: the truth scores 1, an answer without work 0, an invalid task is unscored; and laws of each verifier."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import scipy.constants
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.check.null_answers import prove_null_answers
from agentrl.check.verifiers import GoldAttempt
from agentrl.errors import PluginError
from agentrl.plugins.references import resolve
from agentrl.records import Blame, Score
from agentrl.reward import TaskScorer, configured
from agentrl.reward.rubric import Rubric
from agentrl.reward.verifier_call import timeout_of
from agentrl.reward.worker import QUEUE_TIMEOUT_S, SubprocessWorker
from rewards.exact import Exact, exact
from rewards.form import Form, Length
from rewards.json_schema import JsonSchema, json_schema, same_json
from rewards.mathematics import expression, mathematics
from rewards.numeric import Numeric, numeric, quantity
from rewards.outputs import Outputs, outputs, same
from rewards.pages import answered
from rewards.pattern import Pattern, pattern
from rewards.pattern import verdict as matches
from rewards.sql import Refused, Result, Sql, differ, execute, sql
from rewards.sql_text import orders
from rewards.tables import exact_answer
from rewards.tool_use import ToolUse
from rewards.units import BASE, unit
from tests.judging import episode, judged, task, value

DATABASE = "CREATE TABLE t(a TEXT, b REAL); INSERT INTO t VALUES ('x', 0.1), ('x', 0.2), ('y', 3);"
SCHEMA = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "minLength": 1}}}
PLAIN: dict[str, tuple[Any, str, dict[str, Any]]] = {  # name -> verifier, right answer, data of its task
    "exact": (exact, "north", {"answer": "north"}),
    "numeric": (numeric, "1 m/s", {"answer": "3.6 km/h"}),
    "mathematics": (mathematics, "so \\boxed{0.5}", {"answer": "\\frac{1}{2}"}),
    "json_schema": (json_schema, '{"city": "Rome"}', {"schema": SCHEMA}),
    "pattern": (pattern, "INV-123456", {"answer": "INV-[0-9]{6}"}),
    "sql": (sql, "SELECT sum(b), a FROM t GROUP BY a", {"answer": "SELECT total(b), a FROM t GROUP BY 2", "databases": DATABASE}),
    "form and length": (
        Rubric({"right": (exact, 2.0), "short": (Length(most=5), 1.0), "form": (Form(never=("!",)), 1.0)}, required="right"),
        "north",
        {"answer": "north"},
    ),
}


@pytest.mark.parametrize("name", PLAIN)
async def test_right_answer_scores_1_and_answers_without_work_0(name: str) -> None:
    verifier, right, data = PLAIN[name]
    proof_task = task(**data)
    gold = await judged(verifier, proof_task, episode(right))
    assert gold.value == 1.0, gold
    proof = await prove_null_answers(
        [proof_task], {"t": GoldAttempt(episode=episode(right), score=gold)}, TaskScorer(_verifiers={"v": verifier}), parallel=4
    )
    assert proof.findings == () and proof.table[1:] == (("v", *["0"] * 7),), proof


BROKEN: list[tuple[Any, dict[str, Any]]] = [
    (exact, {}),
    (exact, {"answer": " "}),
    (exact, {"answer": ["a", None]}),
    (exact, {"answer": "a", "exact": {"cased": True}}),
    (exact, {"answer": "a", "exact": "a"}),
    (numeric, {"answer": "many"}),
    (numeric, {"answer": "3 parsecs of wool"}),
    (numeric, {"answer": "3 m", "numeric": {"unit": "kg"}}),
    (numeric, {"answer": "3 m", "numeric": {"relative": -1}}),
    (mathematics, {"answer": ":"}),
    (json_schema, {}),
    (json_schema, {"schema": {"type": "nix"}}),
    (json_schema, {"schema": {"$ref": "http://localhost:1/schema"}}),
    (json_schema, {"schema": {"$ref": "file:///etc/passwd"}}),
    (pattern, {"answer": "(a"}),
    (pattern, {"answer": ""}),
    (sql, {"answer": "SELECT 1"}),
    (sql, {"answer": "SELEC", "databases": DATABASE}),
    (sql, {"answer": "SELECT * FROM t WHERE 0", "databases": DATABASE}),
    (sql, {"answer": "SELECT 1", "databases": 1}),
    *((exact_answer, {"answer": "5", "tolerance": tolerance}) for tolerance in (None, "x", [], -1, "nan")),
    *((answered, {"answer": "5", "answers": answers, "tolerances": [0.0]}) for answers in ({"1": "5"}, [], ["5", "6"])),
    *((answered, {"answer": "5", "answers": ["5"], "tolerances": tolerances}) for tolerances in (None, {}, [None])),
    (outputs, {"answer": {}}),
    (outputs, {"answer": {"a": {"text": "x", "json": 1}}}),
]


@pytest.mark.parametrize(("verifier", "data"), BROKEN)
async def test_invalid_task_is_unscored_and_blamed(verifier: Any, data: dict[str, Any]) -> None:
    score = await judged(verifier, task(**data), episode("{}"))
    assert score.value is None and score.blame is Blame.TASK, score


@pytest.mark.parametrize(
    ("verifier", "answer", "expected"),
    [
        (exact, "  north\n", 1.0),
        (exact, "North", 0.0),
        (Exact(case=False), "NORTH", 1.0),
        (exact, "the  north", 0.0),
        (Exact(spaces=False), "the \n north", 1.0),
        (Exact(after="Answer:"), "Answer: south? Answer: north", 1.0),
        (Exact(after="Answer:"), "north", 0.0),
        (exact, "north" * 10_000, 0.0),
        (exact, None, 0.0),
    ],
)
async def test_exact(verifier: Exact, answer: str | None, expected: float) -> None:
    assert await value(verifier, answer, answer=["north", "the north"]) == expected


@pytest.mark.parametrize(
    ("verifier", "truth", "answer", "expected"),
    [
        (numeric, "200", "2e2", 1.0),
        (numeric, 1234.5, "1,234.5", 1.0),
        (numeric, "1234", "12,34", 0.0),
        (numeric, "200", "200 m", 0.0),
        (numeric, "200 m", "200", 0.0),
        (Numeric(unit="m"), "200", "0.2 km", 1.0),
        (Numeric(unit="m", must_name_unit=True), "200", "200", 0.0),
        (Numeric(unit="cm", relative=0, absolute=1), "2 m", "201", 1.0),
        (Numeric(unit="cm", relative=0, absolute=1), "2 m", "201.001", 0.0),
        (Numeric(relative=1e-2), "100", "100.9", 1.0),
        (Numeric(relative=1e-2), "100", "101.1", 0.0),
        (numeric, "$5", "5 USD", 1.0),
        (numeric, "0.5", "50%", 1.0),
        (numeric, "9.81 m/s^2", "9.81 m s\u207b\u00b2", 1.0),
        (numeric, "0", "nan", 0.0),
        (numeric, "0", "1e999", 0.0),
        (numeric, "3", "\u0663", 0.0),
        (numeric, "3", "3 or 4", 0.0),
        (numeric, "3", "1_000", 0.0),
        (numeric, "2", "2" * 300, 0.0),
        (numeric, "1 m", "1 peV^-12", 0.0),  # more than a float can hold
        (numeric, "1 m", "1 m/peV^12", 0.0),  # a division by less than a float can hold
        (numeric, "0", "7 peV^12 J^-12 peV^12 J^-12", 0.0),
    ],
)
async def test_numeric(verifier: Numeric, truth: Any, answer: str, expected: float) -> None:
    assert await value(verifier, answer, answer=truth) == expected


@pytest.mark.parametrize(
    ("name", "si"),
    [
        ("min", scipy.constants.minute),
        ("h", scipy.constants.hour),
        ("day", scipy.constants.day),
        ("week", scipy.constants.week),
        ("in", scipy.constants.inch),
        ("ft", scipy.constants.foot),
        ("yd", scipy.constants.yard),
        ("mi", scipy.constants.mile),
        ("mph", scipy.constants.mph),
        ("km/h", scipy.constants.kmh),
        ("ha", scipy.constants.hectare),
        ("t", scipy.constants.metric_ton),
        ("lb", scipy.constants.pound),
        ("oz", scipy.constants.ounce),
        ("atm", scipy.constants.atm),
        ("bar", scipy.constants.bar),
        ("L", scipy.constants.liter),
        ("eV", scipy.constants.eV),
        ("cal", scipy.constants.calorie),
        ("deg", scipy.constants.degree),
        ("um", scipy.constants.micron),
    ],
)
def test_units_match_scipys_table(name: str, si: float) -> None:
    parsed = unit(name)
    assert parsed is not None and parsed.factor == pytest.approx(si, rel=1e-15)


@given(
    st.sampled_from(["m", "g", "s", "N", "J", "Wh", "km/h", "kg m^2", "ft", "L", "B"]), st.floats(1e-3, 1e3), st.sampled_from([2, 3, -1])
)
def test_units_convert_there_and_back(name: str, number: float, power: int) -> None:
    plain = quantity(f"{number!r} {name}")
    assert plain is not None and plain.unit is not None
    assert plain.value == pytest.approx(number * plain.unit.factor)
    product = unit(f"{name.split('/')[0].split()[0]}^{power}")
    single = unit(name.split("/")[0].split()[0])
    assert product is not None and single is not None
    assert product.factor == pytest.approx(single.factor**power) and product.powers == tuple(power * exponent for exponent in single.powers)


@given(st.text(max_size=80))
@example("E0")  # an exponent of nothing
@example("-.e5 m")
def test_parsing_numbers_and_units_accepts_any_text(text: str) -> None:
    for parsed in (quantity(text), quantity(f"3 {text}")):
        assert parsed is None or abs(parsed.value) < float("inf")
    assert (parsed_unit := unit(text)) is None or len(parsed_unit.powers) == len(BASE)


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("1/2", "0.5", 1.0),
        ("x^2+2x+1", "$(x+1)^2$", 1.0),
        ("5", "x=5", 1.0),
        ("100000", "1e5", 1.0),
        ("1e-9", "0", 0.0),
        ("42", "\\boxed{41} no, \\boxed{42}", 1.0),
        ("42", "\\{41, 42\\}", 0.0),
        ("42", "\\boxed{41, 42}", 0.0),
        ("42", "41 or 42", 0.0),
        ("(1,2)", "(2,1)", 0.0),
        ("3", "\\boxed{", 0.0),
        ("3", "}{", 0.0),
        ("3", "1/0", 0.0),
        ("3", "9" * 5000, 0.0),
    ],
)
async def test_mathematics(truth: str, answer: str, expected: float) -> None:
    assert await value(mathematics, answer, answer=truth) == expected


@pytest.mark.slow
async def test_endless_expression_is_wrong_and_the_next_is_scored() -> None:
    score = await judged(mathematics, task(answer="3"), episode("9^{9^{9^{9}}}"))
    assert score.value == 0.0 and "returned nothing within 3 s" in score.evidence
    assert await value(mathematics, "3", answer="3") == 1.0


@given(st.text(max_size=60))
def test_braces_of_the_expression_balance(text: str) -> None:
    for extracted in (expression(text), expression(f"\\boxed{{{text}}}")):
        plain = extracted.replace("\\{", "").replace("\\}", "")
        assert plain.count("{") == plain.count("}") or "\\\\" in extracted


@pytest.mark.parametrize(
    ("answer", "expected"),
    [('{"city": "Rome"}', 1.0), ('{"city": ""}', 0.0), ('{"city": "a", "city": "b"}', 0.0), ('{"city": NaN}', 0.0), ("[" * 90_000, 0.0)],
)
async def test_json_schema(answer: str, expected: float) -> None:
    assert await value(JsonSchema(schema=SCHEMA), answer) == expected
    assert await value(JsonSchema(schema=SCHEMA, fenced=True), f"```json\n{answer}\n```") == expected
    assert await value(JsonSchema(schema=SCHEMA), f"```json\n{answer}\n```") == 0.0


async def test_json_can_be_required_to_equal_the_truth() -> None:
    verifier = JsonSchema(schema=SCHEMA, equal=True)
    score = await judged(verifier, task(answer={"city": "Rome"}), episode('{"city": "Oslo"}'))
    assert (score.value, score.parts["v/fits"], score.parts["v/equal"]) == (0.0, 1.0, 0.0)
    assert await value(verifier, '{"city": "Rome"}', answer={"city": "Rome"}) == 1.0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_equal_json_has_equal_text(first: Any, second: Any) -> None:
    assert same_json(first, first) and same(first, first, relative=0) and same(first, first, relative=0, part=True)
    if json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True):
        assert same_json(first, second)
    assert same_json(first, second) == same_json(second, first) == same(first, second, relative=0)


@pytest.mark.parametrize(
    ("verifier", "answer", "expected"),
    [
        (pattern, "2024-01-31", 1.0),
        (pattern, "on 2024-01-31", 0.0),
        (Pattern(anywhere=True), "on 2024-01-31", 1.0),
        (pattern, "\u0662\u0660\u0662\u0664-01-31", 0.0),
    ],
)
async def test_pattern(verifier: Pattern, answer: str, expected: float) -> None:
    assert await value(verifier, answer, answer=r"\d{4}-\d{2}-\d{2}") == expected


@pytest.mark.slow
async def test_text_that_blocks_the_pattern_does_not_match() -> None:
    score = await judged(pattern, task(answer="(a+)+b"), episode("a" * 60))
    assert score.value == 0.0 and "returned nothing within 2 s" in score.evidence


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("SELECT a, total(b) AS s FROM t GROUP BY 1 ORDER BY a DESC;", 1.0),
        ("WITH s AS (SELECT * FROM t) SELECT a, sum(b) FROM s GROUP BY a", 1.0),
        ("SELECT a, b FROM t", 0.0),
        ("SELECT 'x', 0.3 UNION SELECT 'y', 3", 0.0),
        ("SELECT a, sum(b), 1 FROM t GROUP BY a", 0.0),
        ("DELETE FROM t", 0.0),
        ("SELECT a, sum(b) FROM t GROUP BY a; DROP TABLE t", 0.0),
        ("ATTACH '/tmp/x' AS y", 0.0),
        ("PRAGMA query_only = 0", 0.0),
        ("SELECT load_extension('x'), 1", 0.0),
        ("SELECT a, zeroblob(900000000) FROM t", 0.0),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*), 1 FROM c", 0.0),
        ("(" * 5000, 0.0),
    ],
)
async def test_sql(answer: str, expected: float) -> None:
    assert await value(sql, answer, answer="SELECT a, sum(b) FROM t GROUP BY a", databases=[DATABASE]) == expected


async def test_query_must_be_right_on_every_database_and_in_the_truths_order() -> None:
    data = {
        "answer": "SELECT a FROM t ORDER BY b",
        "databases": [DATABASE, "CREATE TABLE t(a, b); INSERT INTO t VALUES ('z', 1), ('w', 2)"],
    }
    assert await value(sql, "SELECT a FROM t ORDER BY b", **data) == 1.0
    assert await value(sql, "SELECT a FROM t ORDER BY a", **data) == 0.0
    assert await value(Sql(ordered=False), "SELECT a FROM t ORDER BY a", **data) == 1.0
    assert await value(Sql(ordered=False), "SELECT a FROM t WHERE a < 'z'", **data) == 0.0


READS = frozenset({("t", "a")})
rows = st.lists(st.tuples(st.integers(-3, 3) | st.none() | st.text(max_size=2), st.floats(-1e6, 1e6)), max_size=12)


@given(rows, st.randoms())
def test_a_permuted_result_is_equal_unless_the_truth_orders(true_rows: list[tuple[Any, ...]], random: Any) -> None:
    answer_rows = [(first, second * (1 + 1e-12)) for first, second in true_rows]
    random.shuffle(answer_rows)
    answer, truth = Result(answer_rows, 2, READS), Result(true_rows, 2, READS)
    assert differ(answer, truth, ordered=False, relative=1e-9) == ""
    pairs = [(*a, *b) for a, b in zip(answer_rows, true_rows, strict=True)]
    in_order = all(a == c and type(a) is type(c) and b == pytest.approx(d, rel=1e-9, abs=0) for a, b, c, d in pairs)
    assert (differ(answer, truth, ordered=True, relative=1e-9) == "") == in_order
    if true_rows:
        assert differ(Result([*true_rows[1:], ("other", 0.5)], 2, READS), truth, ordered=False, relative=1e-9)


def test_order_of_a_subquery_is_not_the_querys() -> None:
    assert orders("SELECT a FROM t ORDER BY a") and orders("SELECT a FROM t UNION SELECT b FROM t ORDER BY 1")
    assert not orders("SELECT * FROM (SELECT a FROM t ORDER BY a)")


def test_a_connection_only_reads_even_past_its_authorizer(monkeypatch: pytest.MonkeyPatch) -> None:
    database = sqlite3.connect("file:/only-reads?vfs=memdb", uri=True)
    database.executescript(DATABASE)
    database.commit()
    monkeypatch.setattr("rewards.sql._authorizer", lambda read: lambda *action: sqlite3.SQLITE_OK)
    for query in ("DELETE FROM t RETURNING a", "INSERT INTO t VALUES (1, 2) RETURNING a"):
        with pytest.raises(Refused, match="readonly"):
            execute("/only-reads", query)
    assert len(execute("/only-reads", "SELECT * FROM t").rows) == 3
    database.close()


@pytest.mark.slow
async def test_slow_answers_do_not_cost_others_their_score(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SubprocessWorker(matches, deadline_s=0.5, processes=1)
    monkeypatch.setattr("rewards.pattern._worker", worker)
    scorer = TaskScorer(timeout_s=0.4, _verifiers={"v": pattern})
    scores = await asyncio.gather(*(scorer(task(answer="(a+)+b"), episode(answer)) for answer in ("a" * 60, "aab")))
    worker.close()
    assert [score.value for score in scores] == [0.0, 1.0], scores


@pytest.mark.parametrize(
    "name", ["json_schema:json_schema", "mathematics:mathematics", "pattern:pattern", "reasoning:own_scorer", "sql:sql"]
)
def test_requests_to_a_worker_are_queued(name: str) -> None:
    assert timeout_of(resolve(f"rewards.{name}"), 30.0) == QUEUE_TIMEOUT_S


FILES = {
    "note.txt": {"text": "one\ntwo\n"},
    "data.json": {"json": {"rows": 4, "share": 0.5}},
    "state.json": {"has": {"door": "open"}},
    "table.csv": {"table": "city,total\nRome,2.50\nOslo,1\n"},
    "gone.tmp": {"absent": True},
}
RIGHT = {
    "note.txt": b"one\r\ntwo",
    "data.json": b'{"share": 0.5000000000001, "rows": 4.0}',
    "state.json": b'{"door": "open", "light": "on"}',
    "table.csv": b"total,city\n1.0,Oslo\n2.5,Rome\n",
}


async def files(verifier: Outputs, **changed: bytes | None) -> Score:
    collected = {path: data for path, data in (RIGHT | changed).items() if data is not None}
    return await judged(verifier, task(answer=FILES, outputs=("*", "gone.tmp")), episode(**collected))


async def test_files_are_compared_by_content() -> None:
    assert (await files(outputs)).value == 1.0
    assert (await files(Outputs(row_order=True))).value == 0.0
    one_off = await files(outputs, **{"table.csv": b"city,total\nRome,2.51\nOslo,1\n"})
    assert one_off.value == 0.0 and one_off.parts["v/files"] == 0.8 and one_off.evidence == "table.csv: different rows"


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("note.txt", None),
        ("note.txt", b"\xff\xfe"),
        ("data.json", b"[" * 100_000),
        ("data.json", b'{"rows": true, "share": 0.5}'),
        ("data.json", b'{"rows": 1' + b"0" * 400 + b', "share": 0.5}'),
        ("state.json", b'{"light": "on"}'),
        ("table.csv", b"city,city\n1,2\n"),
        ("table.csv", b'city,total\n"'),
        ("table.csv", b"city,total\nRome,nan\nOslo,1\n"),
        ("table.csv", b"x" * 2_000_000),
        ("gone.tmp", b""),
    ],
)
async def test_files_that_are_wrong_or_hostile_score_0(path: str, data: bytes | None) -> None:
    assert (await files(outputs, **{path: data})).value == 0.0


@pytest.mark.parametrize(
    ("verifier", "answer", "expected"),
    [
        (Length(most=3), "one two three", 1.0),
        (Length(most=3), "one two three four", 0.0),
        (Length(most=3, zero_at=5), "one two three four", 0.5),
        (Length(most=3), "", 0.0),
        (Length(unit="characters", least=2, most=3), "\U0001f600\U0001f600", 1.0),
        (Length(unit="lines", most=1), "a\nb", 0.0),
        (Form(starts="Dear ", ends="."), " Dear Ann. ", 1.0),
        (Form(contains=("invoice", "sum")), "the invoice", 0.0),
        (Form(never=("ASAP",), case=False), "asap", 0.0),
        (Form(once=("x",)), "x x", 0.0),
        (Form(), "", 0.0),
    ],
)
async def test_form_and_length(verifier: Any, answer: str, expected: float) -> None:
    assert await value(verifier, answer) == expected


@pytest.mark.parametrize(
    ("rules", "calls", "expected"),
    [
        (ToolUse(must=("search",)), "search submit", 1.0),
        (ToolUse(must=("search",)), "submit", 0.0),
        (ToolUse(must=("python",), succeeded=True), "python", 0.0),
        (ToolUse(never=("shell",)), "python shell", 0.0),
        (ToolUse(at_most={"python": 2}), "python python python", 0.0),
        (ToolUse(calls=2), "python search", 1.0),
        (ToolUse(order=("search", "submit")), "search python submit search", 1.0),
        (ToolUse(order=("search", "submit")), "submit search", 0.0),
        (ToolUse(order=("search", "submit")), "search", 0.0),
        (ToolUse(never=("shell",)), "", None),
    ],
)
async def test_tool_use(rules: ToolUse, calls: str, expected: float | None) -> None:
    score = await judged(rules, task(), episode(calls=calls, failed=("python",)))
    assert score.value == expected
    if expected == 0.0:
        assert score.parts["v/rules"] < 1 and score.evidence.startswith("broken rules: ")


async def test_task_overrides_settings() -> None:
    assert await value(numeric, "101", answer=100) == 0.0
    assert await value(numeric, "101", answer=100, numeric={"relative": 0.02}) == 1.0
    assert await value(JsonSchema(schema=SCHEMA), "[]", json_schema={"schema": {"type": "array"}}) == 1.0


@pytest.mark.parametrize("verifier", ["json_schema:json_schema", "mathematics:mathematics"])
def test_missing_package_is_reported_before_a_run_starts(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured, "find_spec", lambda name: None)
    file = Path(__file__).resolve().parents[2] / "rewards" / f"{verifier.partition(':')[0]}.py"
    with pytest.raises(PluginError, match=r"is not installed\n  fix: pip install -e \S+\[rewards\]"):
        TaskScorer().load([f"{file}:{verifier.partition(':')[2]}"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Numeric(unit="parsec"),
        lambda: Pattern(pattern="(a"),
        lambda: Length(least=5, most=2),
        lambda: ToolUse(must=("a",), never=("a",)),
    ],
)
def test_invalid_settings_raise_on_construction(make: Any) -> None:
    with pytest.raises(ValueError):
        make()

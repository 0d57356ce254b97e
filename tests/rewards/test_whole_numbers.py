"""A tolerance for floats never makes two ids or counts equal, in any verifier that compares values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.json_schema import JsonSchema, same_json, strict_json
from rewards.numeric import Numeric, numeric
from rewards.outputs import outputs, same
from rewards.sql import sql
from rewards.tables import exact_answer
from tests.judging import episode, judged, task, value

ID, NEXT = "12345678901234567890", "12345678901234567891"


async def in_files(kind: str, truth: str, answer: str) -> float | None:
    forms: dict[str, Callable[[str], str]] = {
        "json": lambda digits: f'{{"id": {digits}}}',
        "has": lambda digits: f'[{{"id": {digits}}}]',
        "table": lambda digits: f"id,name\n{digits},a\n7,b\n",
    }
    expected: Any = forms[kind](truth) if kind == "table" else json.loads(forms[kind](truth))
    score = await judged(outputs, task(answer={"out": {kind: expected}}, outputs=("*",)), episode(out=forms[kind](answer).encode()))
    return score.value


async def in_sql(truth: str, answer: str) -> float | None:
    databases = "CREATE TABLE t(a INTEGER); INSERT INTO t VALUES (4611686018427387904), (3);"
    return await value(sql, f"SELECT max(a) + {int(answer) - int(truth)} FROM t", answer="SELECT max(a) FROM t", databases=databases)


VERIFIERS: dict[str, Callable[[str, str], Any]] = {
    "tables": lambda truth, answer: value(exact_answer, answer, answer=truth, tolerance=0.0051),
    "numeric": lambda truth, answer: value(numeric, answer, answer=truth),
    "numeric, exact": lambda truth, answer: value(Numeric(relative=0), answer, answer=truth),
    "numeric, units": lambda truth, answer: value(numeric, f"{answer}000 B", answer=f"{truth} kB"),
    "json": lambda truth, answer: value(JsonSchema(schema={"type": "integer"}, equal=True), answer, answer=int(truth)),
    "outputs, json": lambda truth, answer: in_files("json", truth, answer),
    "outputs, has": lambda truth, answer: in_files("has", truth, answer),
    "outputs, table": lambda truth, answer: in_files("table", truth, answer),
    "sql": in_sql,
}


@pytest.mark.parametrize("name", VERIFIERS)
async def test_next_id_is_different(name: str) -> None:
    assert await VERIFIERS[name](ID, ID) == 1.0
    assert await VERIFIERS[name](ID, NEXT) == 0.0


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name not in ("sql", "numeric, units")])
@pytest.mark.parametrize("form", ["{}.0", "{}.00e0"])
async def test_decimal_point_does_not_make_it_right(name: str, form: str) -> None:
    assert await VERIFIERS[name](ID, form.format(ID)) == 1.0
    assert await VERIFIERS[name](ID, form.format(NEXT)) == 0.0


async def test_explicit_tolerance_of_the_task_applies() -> None:
    assert await value(Numeric(relative=0.02), "101", answer=100) == 1.0
    assert await value(Numeric(absolute=2), "101", answer=100) == 1.0
    assert await value(numeric, "101", answer=100) == 0.0


@pytest.mark.parametrize("truth", ["0.003", "-0.003", "0.002", "0.0009"])
@pytest.mark.parametrize("constant", ["0", "0.0", "-0", "0.005", "-0.005", "1e-9"])
async def test_a_constant_is_not_right_under_an_absolute_tolerance(truth: str, constant: str) -> None:
    assert await value(exact_answer, constant, answer=truth, tolerance=0.0051) == 0.0
    assert await value(Numeric(relative=0, absolute=0.0051), constant, answer=truth) == 0.0


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("0", "0.0", 1.0),
        ("0", "-0", 1.0),
        ("0", "1e-300", 0.0),
        ("0", "1e-999", 0.0),
        ("1e-9", "0", 0.0),
        ("6.626e-34", "0", 0.0),
        ("6.626e-34", "6.626e-34", 1.0),
        ("6.626e-34", "6.627e-34", 0.0),
        ("6.626e-34", "-6.626e-34", 0.0),
        ("0.1", "0.1000000000000000055511151231257827", 1.0),
    ],
)
async def test_small_numbers_are_compared_with_a_relative_tolerance(truth: str, answer: str, expected: float) -> None:
    assert await value(exact_answer, answer, answer=truth) == expected
    assert await value(numeric, answer, answer=truth) == expected
    assert await in_files("table", truth, answer) == expected
    if expected == 0.0:
        assert await in_files("json", truth, answer) == expected


@pytest.mark.parametrize("text", ["1e999", "-1e999", "1e-999", "NaN", "-Infinity", "1e400", "1" + "0" * 400 + ".0"])
def test_json_numbers_out_of_the_range_of_floats_raise(text: str) -> None:
    with pytest.raises(ValueError):
        strict_json(text)


@given(st.integers(-(10**24), 10**24), st.integers(-(10**24), 10**24))
def test_json_integers_keep_their_digits_also_with_a_decimal_point(number: int, other_number: int) -> None:
    assert strict_json(f"[{number}, {number}.0, {number}.0e0]") == [number] * 3
    assert same_json(number, other_number) is same(number, other_number, relative=1e-9) is (number == other_number)

"""`rewards.sql`: answers that ignore the data are wrong; the form of a query is irrelevant."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Blame
from agentrl.reward.configured import MAX_ANSWER_CHARS
from rewards.sql import sql
from rewards.sql import verdict as judge
from rewards.sql_text import literals, orders, statements
from tests.judging import episode, judged, task, value

SHOP = """
CREATE TABLE city(id INTEGER PRIMARY KEY, name TEXT UNIQUE, country TEXT);
INSERT INTO city VALUES (1, 'Rome', 'IT'), (2, 'Oslo', 'NO'), (3, 'Bari', 'IT'), (4, 'Bergen', 'NO');
CREATE TABLE sale(city INTEGER REFERENCES city(id), day TEXT, amount REAL NOT NULL CHECK (amount < 1000), n INTEGER);
INSERT INTO sale VALUES (1, '2024-01-01', 9.5, 1), (1, '2024-01-02', 0.5, 2), (2, '2024-01-01', 7.25, 3), (3, '2024-02-01', 1.75, 1),
    (4, '2024-02-03', 3.5, 5), (4, '2024-03-01', 2.25, 2), (2, '2024-03-02', 8.0, 4);
CREATE TRIGGER no_delete BEFORE DELETE ON sale BEGIN SELECT RAISE(ABORT, 'never'); END;
CREATE VIEW italy AS SELECT * FROM city WHERE country = 'IT';
"""
BY_COUNTRY = "SELECT country, sum(amount) FROM sale JOIN city ON city.id = sale.city GROUP BY country"
HIGHEST = "SELECT name FROM city JOIN sale ON sale.city = city.id GROUP BY city.id ORDER BY sum(amount) DESC LIMIT 1"
N_ROME = "SELECT count(*) FROM sale JOIN city ON city.id = sale.city WHERE name = 'Rome'"
WITHOUT_DATA: list[tuple[str, str]] = [
    ("SELECT count(*) FROM sale", answer)
    for answer in (
        "SELECT 7",
        "SELECT 7 FROM sqlite_master LIMIT 1",
        "SELECT 7 FROM sqlite_schema UNION SELECT 7",
        "SELECT 7 FROM pragma_table_info('sale') LIMIT 1",
        "SELECT 7 FROM dbstat LIMIT 1",
        "SELECT value FROM json_each('[7]')",
        "SELECT 7 FROM sale LIMIT 1",
        "SELECT DISTINCT 7 FROM sale",
        "SELECT 7 UNION SELECT n FROM sale WHERE 0",
        "SELECT 7 UNION SELECT n FROM sale LIMIT 1 OFFSET 5",
        "SELECT 7 UNION ALL SELECT * FROM (SELECT n FROM sale LIMIT 0)",
        "WITH s AS (SELECT n FROM sale) SELECT 7",
        "WITH s AS MATERIALIZED (SELECT n FROM sale) SELECT 7 FROM (SELECT 1) LEFT JOIN s LIMIT 1",
        "SELECT x FROM (SELECT 7 AS x) CROSS JOIN sale LIMIT 1",
        "SELECT CASE WHEN max(amount) > 0 THEN 7 ELSE 7 END FROM sale",
        "SELECT 7 + 0 * sum(n) FROM sale",
        "SELECT coalesce(7, max(n)) FROM sale",
        "SELECT 7 WHERE EXISTS (SELECT 1 FROM sale)",
        "SELECT CASE WHEN count(*) = 7 THEN 7 ELSE 1 END FROM sale",
        "SELECT iif(count(*) = 7, 7, 0) FROM sale",
        "VALUES (7)",
    )
]
WITHOUT_DATA += [
    (BY_COUNTRY, "SELECT 'IT', 11.75 FROM sqlite_master UNION SELECT 'NO', 21"),
    (BY_COUNTRY, "SELECT 'IT', 11.75 FROM sale UNION SELECT 'NO', 21.0 FROM city"),
    (BY_COUNTRY, "SELECT country, CASE country WHEN 'IT' THEN 11.75 ELSE 21.0 END FROM city GROUP BY 1"),
    (BY_COUNTRY, "SELECT DISTINCT country, 11.75 + 9.25 * (country = 'NO') FROM city, sale"),
    (HIGHEST, "SELECT 'Oslo' FROM sale LIMIT 1"),
    (HIGHEST, "SELECT name FROM city WHERE id = 2"),
    (HIGHEST, "SELECT name FROM city ORDER BY name DESC LIMIT 1 OFFSET 1"),
    (N_ROME, "SELECT 2 FROM city WHERE name = 'Rome'"),
    ("SELECT count(*) FROM city WHERE country = 'FR'", "SELECT 0 FROM city LIMIT 1"),
    ("SELECT name FROM italy", "SELECT 'Rome' FROM italy UNION SELECT 'Bari'"),
]
OTHERWISE: list[tuple[str, str]] = [
    ("SELECT count(*) FROM sale", "SELECT sum(1) FROM sale"),
    ("SELECT count(*) FROM sale", "SELECT count(*) FROM sale JOIN city ON sale.city = city.id"),
    (BY_COUNTRY, "SELECT country, total(amount) FROM city LEFT JOIN sale ON city = id GROUP BY 1 ORDER BY 2"),
    (BY_COUNTRY, "SELECT DISTINCT country, sum(amount) OVER (PARTITION BY country) FROM sale, city WHERE city = id"),
    (BY_COUNTRY, "WITH s AS (SELECT * FROM sale) SELECT country, avg(amount) * count(*) FROM s JOIN city c ON id = city GROUP BY country"),
    (HIGHEST, "SELECT name FROM city WHERE id = (SELECT city FROM sale GROUP BY city ORDER BY sum(amount) DESC LIMIT 1)"),
    (HIGHEST, "SELECT name FROM city JOIN sale ON city = id GROUP BY name "
              "HAVING sum(amount) = (SELECT max(s) FROM (SELECT sum(amount) AS s FROM sale GROUP BY city))"),
    (N_ROME, "SELECT sum(name = 'Rome') FROM sale JOIN city ON city = id"),
    (N_ROME, "SELECT count(*) FROM sale WHERE city IN (SELECT id FROM city WHERE name LIKE 'Rome')"),
    ("SELECT name FROM italy", "SELECT name FROM city WHERE country = 'IT'"),
    ("SELECT name FROM city WHERE country = 'IT' AND name = 'Rome'", "SELECT name FROM city WHERE name = 'Rome'"),
    ("SELECT avg(amount) FROM sale WHERE day < '2024-02'", "SELECT sum(amount) / count(*) FROM sale WHERE substr(day, 6, 2) = '01'"),
    ("SELECT max(n) FROM sale", "SELECT n FROM sale ORDER BY n DESC LIMIT 1"),
    ("SELECT city, count(*) FROM sale GROUP BY city", "SELECT id, (SELECT count(*) FROM sale WHERE city = id) FROM city"),
    ("SELECT name FROM city EXCEPT SELECT 'Rome'", "SELECT name FROM city WHERE name <> 'Rome'"),
    ("SELECT 1", "SELECT 1"),
]  # fmt: skip


def verdict(truth: str, answer: str, script: str = SHOP, **changed: Any) -> dict[str, str]:
    return judge({"truth": truth, "answer": answer, "databases": [script], "ordered": None, "relative": 1e-9} | changed)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("truth", "answer"), WITHOUT_DATA)
def test_an_answer_that_does_not_use_the_data_is_wrong(truth: str, answer: str) -> None:
    result = verdict(truth, answer)
    assert result["task"] == "" and result["wrong"], answer


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("truth", "answer"), OTHERWISE)
def test_query_in_another_form_is_right(truth: str, answer: str) -> None:
    assert verdict(truth, answer) == {"task": "", "wrong": ""}


@pytest.mark.parametrize("rows", ["(5)", "(5), (5)", "(5), (6)", "(5), (NULL)", "('x')", "(x'00ff'), (0.5)"])
def test_a_constant_is_wrong_on_the_smallest_database(rows: str) -> None:
    script = f"CREATE TABLE t(a); INSERT INTO t VALUES {rows};"
    result = verdict("SELECT a FROM t", f"SELECT column1 FROM (VALUES {rows}) WHERE EXISTS (SELECT a FROM t)", script)
    assert result["wrong"], rows
    assert verdict("SELECT a FROM t", "SELECT x.a FROM t AS x", script)["wrong"] == ""


@pytest.mark.parametrize(
    "table",
    [
        "(a INTEGER PRIMARY KEY)",
        "(a INT PRIMARY KEY) WITHOUT ROWID",
        "(a INTEGER UNIQUE CHECK (a < 9))",
        "(a INT) STRICT",
        "(b AS (2 * a), a INT)",
    ],
)
def test_tables_of_every_kind_have_changed_copies(table: str) -> None:
    script = f"CREATE TABLE t{table}; INSERT INTO t(a) VALUES (2), (4), (8);"
    assert verdict("SELECT sum(a) FROM t", "SELECT total(a) FROM t", script)["wrong"] == ""
    assert verdict("SELECT sum(a) FROM t", "SELECT 14 FROM t LIMIT 1", script)["wrong"]


Q = "SELECT name, 'a;b--c' FROM city"


@pytest.mark.parametrize(
    "query",
    [
        f"{Q};",
        f"{Q};;",
        f"{Q} ; \n ;;",
        f"{Q} -- all of them",
        f"{Q}; -- all; of them",
        f"{Q} /* all; of them */",
        f"{Q}; /* all /* of them */ ;",
        f"-- a comment; with more\n{Q}",
        f"/* first */ {Q} /* never closed",
        f";{Q}",
        f"\ufeff{Q}",
        f"\r\n\t {Q} \r\n",
        f"```sql\n{Q}\n```",
        f"```SQL\n{Q};\n```\n",
        f"~~~\n{Q}\n~~~",
        f"  ````sqlite\n  {Q}\n  ````",
        f"```sql\n{Q}",
        f"``` {Q} ```",
        Q.replace(" ", "\n/**/ "),
        Q.lower().replace("city", '"city"'),
    ],
)
async def test_text_around_a_query_is_ignored(query: str) -> None:
    assert await value(sql, query, answer=Q, databases=SHOP) == 1.0
    if "`" not in query and "~" not in query:
        assert await value(sql, Q, answer=query, databases=SHOP) == 1.0


@pytest.mark.parametrize("suffix", [f"; {Q}", "; DROP TABLE city", ";; DELETE FROM city --", "\n```\n```sql\nSELECT 1\n```"])
async def test_two_statements_or_blocks_are_wrong(suffix: str) -> None:
    assert await value(sql, f"```sql\n{Q}{suffix}" if "```" in suffix else Q + suffix, answer=Q, databases=SHOP) == 0.0


async def test_truth_longer_than_any_answer_is_a_task_fault() -> None:
    score = await judged(sql, task(answer=Q + " " * MAX_ANSWER_CHARS, databases=SHOP), episode(Q))
    assert score.value is None and score.blame is Blame.TASK


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2_500, 6_000, 20_000])
async def test_sums_are_compared_within_the_tolerance_at_any_number_of_groups(groups: int) -> None:
    random = Random(groups)
    rows = [f"({number % groups}, {random.random()})" for number in range(3 * groups)]
    script = "CREATE TABLE g(k, v);" + "".join(f"INSERT INTO g VALUES {', '.join(rows[at : at + 500])};" for at in range(0, len(rows), 500))
    data = {"answer": "SELECT avg(v), sum(v) FROM g GROUP BY k", "databases": script}
    assert await value(sql, "SELECT sum(v) / count(*), avg(v) * count(*) FROM g GROUP BY k", **data) == 1.0
    assert await value(sql, "SELECT sum(v) / count(*), avg(v) * count(*) + (k = 7) FROM g GROUP BY k", **data) == 0.0


@pytest.mark.slow
def test_truth_with_indistinguishable_rows_is_a_task_fault() -> None:
    random = Random(0)
    script = "CREATE TABLE g(v, w); INSERT INTO g VALUES " + ", ".join(f"({random.random()}, {random.random()})" for _ in range(3000))
    result = verdict("SELECT v, w FROM g", "SELECT v, w FROM g", script, relative=0.3)
    assert "too close to each other" in result["task"]
    assert verdict("SELECT v, w FROM g ORDER BY v", "SELECT v, w FROM g ORDER BY v", script, relative=0.3) == {"task": "", "wrong": ""}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT a FROM t ORDER /* x */ BY a", True),
        ("select a from t order\nby a", True),
        ("SELECT sum(a) OVER (ORDER BY b) FROM t", False),
        ("SELECT a FROM t WHERE b = 'x ORDER BY y'", False),
        ('SELECT "order" FROM t -- ORDER BY a', False),
        ("WITH s AS (SELECT a FROM t ORDER BY a) SELECT a FROM s", False),
        ("SELECT a FROM t WINDOW w AS (ORDER BY a)", False),
    ],
)
def test_whether_a_query_orders(query: str, expected: bool) -> None:
    assert orders(query) is expected


@given(st.text(alphabet="'\"`[]-/*;() \n\ufeffaB1.e\u00e9", max_size=60))
def test_any_text_is_accepted(text: str) -> None:
    parsed = statements(text)
    assert all(statement and statement in text and not statement.startswith(("--", "/*", ";")) for statement in parsed)
    assert [statements(statement) for statement in parsed] == [[statement] for statement in parsed]
    orders(text), literals(text)

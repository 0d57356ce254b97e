"""The kinds of questions: phrasings, the program that answers them correctly, and typical sloppy programs that do not.

A kind's `ask` draws a question about a table, or returns None if the table yields no good question. For a good question, the sloppy
programs do not print the truth, so that only careful work scores. Programs are templates over the question's names. The truth is computed
from the rows, never by running a program.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from random import Random

Row = dict[str, str]
ROUNDED = 0.0051  # answers to two decimals may differ by half a unit, and slightly more because of binary fractions


@dataclass(frozen=True, kw_only=True)
class Table:
    """A generated or real table for questions: rows of text cells, and the roles of the columns."""

    stem: str
    other: str  # stem of a second file, for questions that need two files
    rows: Sequence[Row]
    labels: Sequence[str]  # columns whose cells are all distinct
    groups: Sequence[str] = ()  # columns with few distinct cells
    numbers: Sequence[str] = ()
    dates: Sequence[str] = ()  # columns of YYYY-MM-DD


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a table: the names in its phrasings and programs, its files, and the truth."""

    names: Mapping[str, str]
    files: Mapping[str, str]
    answer: str
    tolerance: float = 0.0  # absolute tolerance, in addition to the verifier's relative tolerance


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of question. `phrasings`, `right` and `sloppy` are format templates over `Question.names`. `{x!r}` writes a name in quotes."""

    name: str
    phrasings: tuple[str, ...]
    right: str
    sloppy: tuple[str, ...]
    ask: Callable[[Random, Table], Question | None] = field(repr=False)

    def program(self, names: Mapping[str, str], body: str = "") -> str:
        """Returns the Python source of the correct program or, if `body` is set, of a different template of this kind."""
        return _opening(names["f"]) + (body or self.right).format(**names)


def _opening(path: str) -> str:
    """Returns the lines of code that read a file into `r`, as dictionaries or as lines, depending on the file's extension."""
    if path.endswith(".json"):
        return f"import json\nr=json.load(open({path!r}))\n"
    if path.endswith(".txt"):
        return f"r=open({path!r}).read().splitlines()\n"
    return f"import csv\nr=list(csv.DictReader(open({path!r})))\n"


def _csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _json(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = (json.dumps({c: row[c] for c in columns}, ensure_ascii=False) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _save(rng: Random, table: Table, *needed: str, also: int = 1, json_share: float = 1 / 3) -> tuple[str, dict[str, str]]:
    """Writes the needed columns and up to `also` other columns, in random order, as CSV or (with probability `json_share`) as JSON."""
    spare = [c for c in (*table.labels, *table.groups, *table.numbers, *table.dates) if c not in needed]
    columns = [*needed, *rng.sample(spare, min(also, len(spare)))]
    rng.shuffle(columns)
    as_json = rng.random() < json_share
    path = table.stem + (".json" if as_json else ".csv")
    return path, {path: (_json if as_json else _csv)(table.rows, columns)}


def _decimal(value: float) -> str:
    """Returns the shortest decimal notation of a value that is a sum of decimal cells."""
    return f"{round(value, 9):.9f}".rstrip("0").rstrip(".")


def _column(table: Table, name: str) -> list[float]:
    return [float(row[name]) for row in table.rows]


def _group_value(rng: Random, table: Table, group: str) -> str:
    return rng.choice(sorted({row[group] for row in table.rows}))


def _total(rng: Random, table: Table) -> Question | None:
    c = rng.choice(table.numbers)
    values = _column(table, c)
    if round(sum(map(int, values)), 2) == round(sum(values), 2) or not values[0]:
        return None
    path, files = _save(rng, table, c)
    return Question(names={"f": path, "c": c}, files=files, answer=_decimal(sum(values)), tolerance=ROUNDED)


def _filter_count(rng: Random, table: Table) -> Question | None:
    c = rng.choice(table.numbers)
    n = rng.choice(table.rows)[c]
    way, op = rng.choice((("above", ">"), ("below", "<")))
    above = way == "above"
    count = sum((v > float(n)) if above else (v < float(n)) for v in _column(table, c))
    as_text = sum((row[c] > n) if above else (row[c] < n) for row in table.rows)
    if count in (0, as_text, len(table.rows)):
        return None
    path, files = _save(rng, table, c)
    return Question(names={"f": path, "c": c, "n": n, "way": way, "op": op}, files=files, answer=str(count))


def _filter_total(rng: Random, table: Table) -> Question | None:
    c, k = rng.choice(table.numbers), rng.choice(table.groups)
    v = _group_value(rng, table, k)
    picked = [float(row[c]) for row in table.rows if row[k] == v]
    if len(picked) == len(table.rows) or abs(sum(picked) - len(picked)) < 1:
        return None
    path, files = _save(rng, table, c, k)
    return Question(names={"f": path, "c": c, "k": k, "v": v}, files=files, answer=_decimal(sum(picked)), tolerance=ROUNDED)


def _average(rng: Random, table: Table) -> Question | None:
    c, k = rng.choice(table.numbers), rng.choice(table.groups)
    v = _group_value(rng, table, k)
    picked = [float(row[c]) for row in table.rows if row[k] == v]
    mean, everything = sum(picked) / len(picked), _column(table, c)
    if len(picked) == len(table.rows) or abs(mean - sum(everything) / len(everything)) < 0.1:
        return None
    path, files = _save(rng, table, c, k)
    return Question(names={"f": path, "c": c, "k": k, "v": v}, files=files, answer=_decimal(mean), tolerance=ROUNDED)


def _extreme(rng: Random, table: Table) -> Question | None:
    c, k = rng.choice(table.numbers), rng.choice(table.labels)
    end, m = rng.choice((("highest", "max"), ("lowest", "min")))
    pick = max if end == "highest" else min
    values = _column(table, c)
    best = pick(values)
    answer = table.rows[values.index(best)][k]
    as_text = pick(table.rows, key=lambda row: row[c])[k]
    if values.count(best) > 1 or as_text == answer:
        return None
    path, files = _save(rng, table, c, k)
    return Question(names={"f": path, "c": c, "k": k, "end": end, "m": m}, files=files, answer=answer)


def _rank(rng: Random, table: Table) -> Question | None:
    c = rng.choice(table.numbers)
    nth, i = rng.choice((("second", 2), ("third", 3), ("fourth", 4), ("fifth", 5)))
    values = sorted(_column(table, c))
    if values[-i] in (values[i], values[-1], values[-i + 1]):
        return None
    path, files = _save(rng, table, c)
    return Question(names={"f": path, "c": c, "nth": nth, "i": str(i)}, files=files, answer=_decimal(values[-i]))


def _distinct(rng: Random, table: Table) -> Question | None:
    k = rng.choice(table.groups)
    count = len({row[k] for row in table.rows})
    if count < 2 or count == len(table.rows):
        return None
    path, files = _save(rng, table, k)
    return Question(names={"f": path, "k": k}, files=files, answer=str(count))


def _most_common(rng: Random, table: Table) -> Question | None:
    k = rng.choice(table.groups)
    cells = [row[k] for row in table.rows]
    ranked = Counter(cells).most_common(2)
    if len(ranked) < 2 or ranked[0][1] == ranked[1][1] or ranked[0][0] in (max(cells), cells[0]):
        return None
    path, files = _save(rng, table, k)
    return Question(names={"f": path, "k": k}, files=files, answer=ranked[0][0])


def _join(rng: Random, table: Table) -> Question | None:
    c, g, k = rng.choice(table.numbers), rng.choice(table.groups), rng.choice(table.labels)
    v = _group_value(rng, table, g)
    picked = [float(row[c]) for row in table.rows if row[g] == v]
    if len(picked) == len(table.rows) or abs(sum(_column(table, c)) - sum(picked)) < 0.1:
        return None
    path, files = _save(rng, table, c, k, also=0, json_share=0.0)
    other = table.other + ".csv"
    columns = rng.sample([k, g], 2)
    files[other] = _csv(rng.sample(table.rows, len(table.rows)), columns)
    names = {"f": path, "o": other, "k": k, "c": c, "g": g, "v": v}
    return Question(names=names, files=files, answer=_decimal(sum(picked)), tolerance=ROUNDED)


def _date_span(rng: Random, table: Table) -> Question | None:
    if not table.dates:
        return None
    d = rng.choice(table.dates)
    days = [date.fromisoformat(row[d]).toordinal() for row in table.rows]
    span = max(days) - min(days)
    if abs(days[-1] - days[0]) == span:
        return None
    path, files = _save(rng, table, d)
    return Question(names={"f": path, "d": d}, files=files, answer=str(span))


def _lines(rng: Random, table: Table) -> list[str]:
    column = rng.choice(table.labels)
    return [row[column] for row in table.rows]


def _longest_line(rng: Random, table: Table) -> Question | None:
    lines = _lines(rng, table)
    lengths = sorted(map(len, lines))
    longest = max(lines, key=len)
    if lengths[-1] == lengths[-2] or longest in (max(lines), lines[0]):
        return None
    path = table.stem + ".txt"
    return Question(names={"f": path}, files={path: "\n".join(lines) + "\n"}, answer=longest)


def _line_count(rng: Random, table: Table) -> Question | None:
    lines = _lines(rng, table)
    words = sorted({word for line in lines for word in line.replace(",", "").split() if len(word) > 2})
    if not words:
        return None
    w = rng.choice(words)
    count = sum(w in line for line in lines)
    if count in (0, len(lines), sum(line == w for line in lines)):
        return None
    path = table.stem + ".txt"
    return Question(names={"f": path, "w": w}, files={path: "\n".join(lines) + "\n"}, answer=str(count))


KINDS = (
    Kind(
        name="total",
        phrasings=("What is the total of {c!r} in {f!r}?", "Add up {c!r} over all rows of {f!r}.", "Read {f!r}. What do the {c!r} sum to?"),
        right="print(round(sum(float(x[{c!r}]) for x in r),2))",
        sloppy=("print(round(sum(float(x[{c!r}]) for x in r[1:]),2))", "print(round(sum(int(float(x[{c!r}])) for x in r),2))"),
        ask=_total,
    ),
    Kind(
        name="filter_count",
        phrasings=(
            "How many rows of {f!r} have {c!r} {way} {n}?",
            "In {f!r}, how often is {c!r} {way} {n}?",
            "Count the rows with {c!r} {way} {n} in {f!r}.",
        ),
        right="print(sum(float(x[{c!r}]){op}{n} for x in r))",
        sloppy=("print(sum(x[{c!r}]{op}'{n}' for x in r))", "print(len(r))"),
        ask=_filter_count,
    ),
    Kind(
        name="filter_total",
        phrasings=(
            "What is the total of {c!r} in {f!r} where {k!r} is {v!r}?",
            "In {f!r}, add up {c!r} of the rows whose {k!r} is {v!r}.",
            "For {k!r} equal to {v!r}, what does {c!r} sum to in {f!r}?",
        ),
        right="print(round(sum(float(x[{c!r}]) for x in r if x[{k!r}]=={v!r}),2))",
        sloppy=("print(round(sum(float(x[{c!r}]) for x in r),2))", "print(round(sum(1 for x in r if x[{k!r}]=={v!r}),2))"),
        ask=_filter_total,
    ),
    Kind(
        name="average",
        phrasings=(
            "What is the average {c!r} in {f!r} where {k!r} is {v!r}, to 2 decimals?",
            "In {f!r}, give the mean of {c!r} for {k!r} {v!r} (2 decimals).",
            "Average {c!r} of the rows of {f!r} whose {k!r} is {v!r}, 2 decimals?",
        ),
        right="v=[float(x[{c!r}]) for x in r if x[{k!r}]=={v!r}]\nprint(round(sum(v)/len(v),2))",
        sloppy=(
            "v=[float(x[{c!r}]) for x in r if x[{k!r}]=={v!r}]\nprint(round(sum(v)/len(r),2))",
            "v=[float(x[{c!r}]) for x in r]\nprint(round(sum(v)/len(v),2))",
        ),
        ask=_average,
    ),
    Kind(
        name="extreme",
        phrasings=(
            "Which {k!r} has the {end} {c!r} in {f!r}?",
            "In {f!r}, name the {k!r} with the {end} {c!r}.",
            "Look at {f!r}: where {c!r} is {end}, what is {k!r}?",
        ),
        right="print({m}(r,key=lambda x:float(x[{c!r}]))[{k!r}])",
        sloppy=("print({m}(r,key=lambda x:x[{c!r}])[{k!r}])", "print({m}(float(x[{c!r}]) for x in r))"),
        ask=_extreme,
    ),
    Kind(
        name="rank",
        phrasings=(
            "What is the {nth} highest {c!r} in {f!r}?",
            "In {f!r}, find the {nth} largest value of {c!r}.",
            "Sort {f!r} by {c!r}: what is the {nth} highest?",
        ),
        right="v=sorted(float(x[{c!r}]) for x in r)\nprint(v[-{i}])",
        sloppy=("v=sorted(float(x[{c!r}]) for x in r)\nprint(v[{i}])", "v=sorted(float(x[{c!r}]) for x in r)\nprint(max(v))"),
        ask=_rank,
    ),
    Kind(
        name="distinct",
        phrasings=(
            "How many different {k!r} are in {f!r}?",
            "In {f!r}, how many distinct values has {k!r}?",
            "Count the unique {k!r} of {f!r}.",
        ),
        right="print(len(set(x[{k!r}] for x in r)))",
        sloppy=("print(len(list(x[{k!r}] for x in r)))", "print(len(r))"),
        ask=_distinct,
    ),
    Kind(
        name="most_common",
        phrasings=(
            "Which {k!r} is most frequent in {f!r}?",
            "In {f!r}, what is the most common {k!r}?",
            "Which value of {k!r} occurs most often in {f!r}?",
        ),
        right="v=[x[{k!r}] for x in r]\nprint(max(v,key=v.count))",
        sloppy=("v=[x[{k!r}] for x in r]\nprint(max(v))", "v=[x[{k!r}] for x in r]\nprint(v[0])"),
        ask=_most_common,
    ),
    Kind(
        name="join",
        phrasings=(
            "{f!r} and {o!r} share {k!r}. What is the total of {c!r} where {g!r} is {v!r}?",
            "Join {f!r} with {o!r} on {k!r}: add up {c!r} for {g!r} {v!r}.",
            "Match {f!r} to {o!r} by {k!r}. What does {c!r} sum to where {g!r} is {v!r}?",
        ),
        right=(
            "k={{x[{k!r}] for x in csv.DictReader(open({o!r})) if x[{g!r}]=={v!r}}}\n"
            "print(round(sum(float(x[{c!r}]) for x in r if x[{k!r}] in k),2))"
        ),
        sloppy=(
            "k={{x[{k!r}] for x in csv.DictReader(open({o!r})) if x[{g!r}]=={v!r}}}\nprint(round(sum(float(x[{c!r}]) for x in r),2))",
            "k={{x[{k!r}] for x in csv.DictReader(open({o!r}))}}\nprint(round(sum(float(x[{c!r}]) for x in r if x[{k!r}] in k),2))",
        ),
        ask=_join,
    ),
    Kind(
        name="date_span",
        phrasings=(
            "How many days lie between the earliest and latest {d!r} in {f!r}?",
            "In {f!r}, how many days does {d!r} span?",
            "Days from the earliest to the latest {d!r} of {f!r}?",
        ),
        right="from datetime import date\nv=sorted(date.fromisoformat(x[{d!r}]) for x in r)\nprint((v[-1]-v[0]).days)",
        sloppy=(
            "from datetime import date\nv=list(date.fromisoformat(x[{d!r}]) for x in r)\nprint((v[-1]-v[0]).days)",
            "print(len(r))",
        ),
        ask=_date_span,
    ),
    Kind(
        name="longest_line",
        phrasings=(
            "Which line of {f!r} is the longest?",
            "What is the longest line in {f!r}?",
            "Give the line of {f!r} with the most characters.",
        ),
        right="print(max(r,key=len))",
        sloppy=("print(max(r))", "print(r[0])"),
        ask=_longest_line,
    ),
    Kind(
        name="line_count",
        phrasings=(
            "How many lines of {f!r} contain {w!r}?",
            "In {f!r}, count the lines with {w!r} in them.",
            "On how many lines of {f!r} does {w!r} appear?",
        ),
        right="print(sum({w!r} in x for x in r))",
        sloppy=("print(sum({w!r}==x for x in r))", "print(len(r))"),
        ask=_line_count,
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}

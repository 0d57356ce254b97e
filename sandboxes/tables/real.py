"""Real tables for the real held-out split, with their original column names and cells: scikit-learn's datasets and pycountry's records.

Rows and columns are sampled to keep files small. scikit-learn's tables have no column that identifies a row, so this module adds one
(`sample`, `patient`, ...). Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Protocol

from agentrl.base.installation import install_command
from agentrl.errors import UserError
from sandboxes.tables.kinds import Row, Table


class Source(Protocol):
    """A source of small real tables."""

    def table(self, rng: Random) -> Table:
        """Returns a random table."""
        ...


@dataclass(frozen=True, kw_only=True)
class Science:
    """A table from scikit-learn: sampled rows, with a column `label` that identifies each row."""

    stem: str
    other: str
    dataset: str
    label: str
    numbers: tuple[str, ...]
    group: str  # a column of the table, or a name for the column with the class
    options: Mapping[str, Any] = field(default_factory=dict)

    def table(self, rng: Random) -> Table:
        """Returns a random sample of rows."""
        records, classes = _frame(self.dataset, tuple(self.options.items()))
        rows: list[Row] = []
        for index in rng.sample(range(len(records)), min(rng.randint(16, 26), len(records))):
            record = records[index]
            row = {self.label: f"{self.label[0]}{index + 1}", **{c: _text(record[c]) for c in self.numbers}}
            row[self.group] = _text(record[self.group]) if self.group in record else classes[int(record["target"])]
            rows.append(row)
        return Table(stem=self.stem, other=self.other, rows=rows, labels=(self.label,), groups=(self.group,), numbers=self.numbers)


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Records from pycountry that have all of these columns. If `groups` is set, only records from some of the larger groups are used."""

    stem: str
    dataset: str
    labels: tuple[str, ...]
    groups: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()

    def table(self, rng: Random) -> Table:
        """Returns a random sample of records."""
        columns = (*self.labels, *self.groups, *self.dates)
        records = [r for r in _records(self.dataset) if all(c in r for c in columns) and all(len(r[d]) == 10 for d in self.dates)]
        if self.groups:
            records = _recurring(rng, records, self.groups[0])
        most = rng.randint(14, 24) if len(records) > 24 else rng.randint(8, len(records))
        rows: list[Row] = []
        for record in rng.sample(records, min(most, len(records))):
            if all(record[label] != row[label] for row in rows for label in self.labels):
                rows.append({c: record[c] for c in columns})
        return Table(stem=self.stem, other=self.stem + "_2", rows=rows, labels=self.labels, groups=self.groups, dates=self.dates)


def _missing(package: str, error: ImportError) -> UserError:
    return UserError(f"the real tables need {package}, which cannot be imported: {error}", fix=install_command("cpu"))


@cache
def _frame(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Returns the rows of a scikit-learn table and the names of its classes."""
    try:
        from sklearn import datasets  # imported here because only the real tables need it
    except ImportError as error:
        raise _missing("scikit-learn", error) from error
    bunch = getattr(datasets, f"load_{name}")(as_frame=True, **dict(options))
    return tuple(bunch.frame.to_dict("records")), tuple(str(n) for n in bunch.get("target_names", ()))


@cache
def _records(name: str) -> tuple[Mapping[str, str], ...]:
    """Returns pycountry's records of one kind as plain text. Excludes records that contain a quotation mark or a backslash."""
    try:
        import pycountry
    except ImportError as error:
        raise _missing("pycountry", error) from error
    rows = ({k: v for k, v in record if isinstance(v, str) and k != "flag"} for record in getattr(pycountry, name))
    return tuple(row for row in rows if not any(mark in cell for cell in row.values() for mark in "'\"\\"))


def _text(value: float) -> str:
    """Returns the shortest decimal notation of a cell: 5.1, 1050, 0.2776."""
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def _recurring(rng: Random, records: Iterable[Mapping[str, str]], group: str) -> list[Mapping[str, str]]:
    """Returns records from three to five of the larger groups, at most twelve from each group."""
    by_group: dict[str, list[Mapping[str, str]]] = {}
    for record in records:
        by_group.setdefault(record[group], []).append(record)
    large = sorted(g for g, members in by_group.items() if len(members) >= 4)
    chosen = rng.sample(large, min(len(large), rng.randint(3, 5)))
    return [record for g in chosen for record in rng.sample(by_group[g], min(len(by_group[g]), 12))]


SCIENCE: tuple[Source, ...] = (
    Science(
        stem="iris",
        other="iris_species",
        dataset="iris",
        label="sample",
        numbers=("sepal length (cm)", "sepal width (cm)", "petal length (cm)", "petal width (cm)"),
        group="species",
    ),
    Science(
        stem="wine",
        other="wine_classes",
        dataset="wine",
        label="bottle",
        numbers=(
            *("alcohol", "malic_acid", "alcalinity_of_ash", "magnesium", "total_phenols", "flavanoids"),
            *("proanthocyanins", "color_intensity", "od280/od315_of_diluted_wines", "proline"),
        ),
        group="class",
    ),
    Science(
        stem="breast_cancer",
        other="diagnosis",
        dataset="breast_cancer",
        label="case",
        numbers=(
            *("mean radius", "mean texture", "mean perimeter", "mean area", "perimeter error", "area error"),
            *("worst radius", "worst texture", "worst perimeter", "worst area"),
        ),
        group="diagnosis",
    ),
    Science(
        stem="diabetes",
        other="diabetes_sex",
        dataset="diabetes",
        label="patient",
        numbers=("bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"),
        group="sex",
        options={"scaled": False},
    ),
    Science(
        stem="linnerud",
        other="linnerud_waist",
        dataset="linnerud",
        label="man",
        numbers=("Chins", "Situps", "Jumps", "Weight", "Pulse"),
        group="Waist",
    ),
)
GROUPED: tuple[Source, ...] = (
    Registry(stem="subdivisions", dataset="subdivisions", labels=("code", "name"), groups=("country_code", "type")),
    Registry(stem="languages", dataset="languages", labels=("alpha_3", "name"), groups=("type", "scope")),
)
COUNTRIES: tuple[Source, ...] = (
    Registry(stem="countries", dataset="countries", labels=("name",)),
    Registry(stem="official_names", dataset="countries", labels=("official_name", "name")),
)
DATED: tuple[Source, ...] = (
    Registry(stem="historic_countries", dataset="historic_countries", labels=("name", "alpha_4"), dates=("withdrawal_date",)),
)
SOURCES: Mapping[str, tuple[Source, ...]] = {
    "distinct": (*SCIENCE, *GROUPED, *GROUPED),
    "most_common": (*SCIENCE, *GROUPED, *GROUPED),
    "date_span": DATED,
    "longest_line": (*COUNTRIES, *GROUPED),
    "line_count": (*COUNTRIES, *GROUPED),
}


def real_table(rng: Random, kind: str) -> Table:
    """Returns a real table for a kind of question. Raises `UserError` if its package is missing."""
    return rng.choice(SOURCES.get(kind, SCIENCE)).table(rng)

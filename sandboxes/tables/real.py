"""Real tables for the held-out part: those that scikit-learn ships, and pycountry's records. Column names and cells are theirs.

Rows and columns are sampled to keep files small. scikit-learn's tables have no column that names a row, so one is added
(`sample`, `patient`, ...); pycountry's `numeric` codes serve as numbers. Nothing here is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from agentrl.errors import UserError
from sandboxes.tables.kinds import Row, Table

Source = Callable[[Random], Table]


def _missing(package: str, module: str, error: ImportError) -> UserError:
    return UserError(f"the real tables need {module}, which does not import: {error}", fix=f"pip install {package}")


@cache
def _frame(name: str, options: tuple[tuple[str, Any], ...] = ()) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Rows of one of scikit-learn's tables, and the names of its classes."""
    try:
        from sklearn import datasets  # here, not above: only the real part needs it
    except ImportError as error:
        raise _missing("scikit-learn pandas", "scikit-learn", error) from error
    bunch = getattr(datasets, f"load_{name}")(as_frame=True, **dict(options))
    return tuple(bunch.frame.to_dict("records")), tuple(str(n) for n in bunch.get("target_names", ()))


@cache
def _records(name: str) -> tuple[Mapping[str, str], ...]:
    """pycountry's records of one kind, as plain text; those with a quotation mark in a cell are left out."""
    try:
        import pycountry
    except ImportError as error:
        raise _missing("pycountry", "pycountry", error) from error
    rows = ({k: v for k, v in record if isinstance(v, str) and k != "flag"} for record in getattr(pycountry, name))
    return tuple(row for row in rows if not any(mark in cell for cell in row.values() for mark in "'\"\\"))


def _text(value: float) -> str:
    """The shortest decimal text of a cell: 5.1, 1050, 0.2776."""
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def _science(stem: str, other: str, dataset: str, label: str, numbers: Sequence[str], group: str, classes: bool, **options: Any) -> Source:
    """A table of scikit-learn: rows sampled, numbers as text; `group` is its class, or one of its own columns."""

    def build(rng: Random) -> Table:
        records, names = _frame(dataset, tuple(options.items()))
        rows: list[Row] = []
        for index in rng.sample(range(len(records)), min(rng.randint(16, 26), len(records))):
            record = records[index]
            row = {label: f"{label[0]}{index + 1}", **{c: _text(record[c]) for c in numbers}}
            row[group] = names[int(record["target"])] if classes else _text(record[group])
            rows.append(row)
        return Table(stem=stem, other=other, rows=rows, labels=(label,), groups=(group,), numbers=tuple(numbers))

    return build


def _registry(
    stem: str,
    other: str,
    dataset: str,
    labels: Sequence[str],
    groups: Sequence[str],
    numbers: Sequence[str] = (),
    dates: Sequence[str] = (),
) -> Source:
    """Records of pycountry: those that have every column, and of them a sample whose groups recur."""
    columns = (*labels, *groups, *numbers, *dates)

    def build(rng: Random) -> Table:
        records = [r for r in _records(dataset) if all(c in r for c in columns) and all(len(r[d]) == 10 for d in dates)]
        if groups:
            records = _recurring(rng, records, groups[0])
        seen: dict[str, set[str]] = {label: set() for label in labels}
        rows: list[Row] = []
        for record in rng.sample(records, min(rng.randint(14, 24), len(records)) - (2 if dates else 0)):
            if all(record[label] not in seen[label] for label in labels):
                rows.append({c: record[c] for c in columns})
                for label in labels:
                    seen[label].add(record[label])
        return Table(
            stem=stem, other=other, rows=rows, labels=tuple(labels), groups=tuple(groups), numbers=tuple(numbers), dates=tuple(dates)
        )

    return build


def _recurring(rng: Random, records: Iterable[Mapping[str, str]], group: str) -> list[Mapping[str, str]]:
    """Records of three to five of the larger groups, in about equal parts."""
    by_group: dict[str, list[Mapping[str, str]]] = {}
    for record in records:
        by_group.setdefault(record[group], []).append(record)
    large = sorted(g for g, members in by_group.items() if len(members) >= 4)
    return [r for g in rng.sample(large, min(len(large), rng.randint(3, 5))) for r in rng.sample(by_group[g], min(len(by_group[g]), 12))]


SCIENCE: tuple[Source, ...] = (
    _science(
        "iris", "iris_species", "iris", "sample",
        ("sepal length (cm)", "sepal width (cm)", "petal length (cm)", "petal width (cm)"), "species", True,
    ),
    _science(
        "wine", "wine_classes", "wine", "bottle",
        ("alcohol", "malic_acid", "alcalinity_of_ash", "magnesium", "total_phenols", "flavanoids", "proanthocyanins", "color_intensity",
         "od280/od315_of_diluted_wines", "proline"), "class", True,
    ),
    _science(
        "breast_cancer", "diagnosis", "breast_cancer", "case",
        ("mean radius", "mean texture", "mean perimeter", "mean area", "area error", "perimeter error", "worst radius", "worst texture",
         "worst perimeter", "worst area"), "diagnosis", True,
    ),
    _science("diabetes", "diabetes_sex", "diabetes", "patient", ("bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"), "sex", False, scaled=False),
    _science("linnerud", "linnerud_waist", "linnerud", "man", ("Chins", "Situps", "Jumps", "Weight", "Pulse"), "Waist", False),
)  # fmt: skip
REGISTRIES: tuple[Source, ...] = (
    _registry("subdivisions", "subdivision_types", "subdivisions", ("code", "name"), ("country_code", "type")),
    _registry("languages", "language_types", "languages", ("alpha_3", "name"), ("type", "scope")),
)
COUNTRIES: tuple[Source, ...] = (
    _registry("countries", "country_codes", "countries", ("name", "alpha_2", "alpha_3"), ()),
    _registry("official_names", "country_codes", "countries", ("official_name", "name"), ()),
)
DATED: tuple[Source, ...] = (
    _registry("historic_countries", "withdrawn", "historic_countries", ("name", "alpha_4"), (), (), ("withdrawal_date",)),
)

SOURCES: Mapping[str, tuple[Source, ...]] = {
    "distinct": (*SCIENCE, *REGISTRIES, *REGISTRIES),
    "most_common": (*SCIENCE, *REGISTRIES, *REGISTRIES),
    "date_span": DATED,
    "longest_line": (*COUNTRIES, *COUNTRIES, *REGISTRIES),
    "line_count": (*COUNTRIES, *REGISTRIES),
}


def real_table(rng: Random, kind: str) -> Table:
    """A real table that suits a kind of question. Raises `UserError` when its package is missing."""
    return rng.choice(SOURCES.get(kind, SCIENCE))(rng)

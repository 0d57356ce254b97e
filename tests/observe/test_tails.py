from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe import tails
from agentrl.observe.rundata import is_finite, read_lines
from agentrl.observe.tails import MetricsTable
from agentrl.view.run_data import reward_drops

values = st.one_of(st.none(), st.floats(), st.integers(-5, 5), st.text(max_size=3), st.booleans())
lines = st.lists(st.one_of(st.dictionaries(st.sampled_from(("step", "a", "b")), values), st.just("torn {")), max_size=12)


@given(lines, st.lists(st.integers(0, 400), max_size=5))
def test_a_file_that_grows_in_pieces_has_the_same_table_as_the_full_file(
    tmp_path_factory: pytest.TempPathFactory, contents: list[object], cuts: list[int]
) -> None:
    """Even if a piece ends within a line. The reference implementation reads all lines at once."""
    run = tmp_path_factory.mktemp("run")
    content = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in contents).encode()
    path, table, edges = (
        run / "metrics.jsonl",
        MetricsTable(run / "metrics.jsonl"),
        sorted({0, *(min(cut, len(content)) for cut in cuts), len(content)}),
    )
    for start, end in pairwise(edges):
        with path.open("ab") as file:
            file.write(content[start:end])
        table.refresh()
    rows = {line["step"]: line for line in read_lines(path, {"step": int}, []) if not isinstance(line["step"], bool) and line["step"] >= 0}
    assert table.steps == sorted(rows)
    for key in ("a", "b"):
        points = [(step, value) for step in sorted(rows) if is_finite(value := rows[step].get(key)) and abs(value) <= tails.MAX_NUMBER]
        assert table.series(key) == points
    assert not table.refresh()


def test_a_replaced_file_is_reread(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n')
    table = MetricsTable(path)
    assert table.refresh() and table.series("a") == [(1, 1.0), (2, 2.0)]
    other = tmp_path / "other"
    other.write_text('{"step": 1, "b": 5}\n' * 9)
    os.replace(other, path)
    assert table.refresh() and table.steps == [1] and table.series("a") == [] and table.row(1) == {"step": 1.0, "b": 5.0}
    path.unlink()
    assert table.refresh() and table.steps == [] and not table.refresh()


def test_memory_is_bounded_and_a_note_reports_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MAX_CELLS", 20)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "a": 1, "b": 2}) + "\n" for step in range(50)))
    table = MetricsTable(tmp_path / "metrics.jsonl")
    table.refresh()
    assert table.cells <= 20 and "are not shown" in table.notes[0]


def test_the_largest_drops_of_the_reward_come_first() -> None:
    points = [(1, 0.5), (2, 0.6), (3, 0.2), (4, 0.5), (5, 0.45), (6, 0.5), (7, 0.2)]
    assert [(drop["step"], round(drop["before"], 9)) for drop in reward_drops(points)] == [(3, 0.6), (7, 0.5)]
    assert reward_drops([(1, 0.5), (2, 0.5), (3, 0.5)]) == [] and reward_drops([]) == []

"""Exported files are read back unchanged, and a damaged file is a clear error."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import StoreError, UserError
from agentrl.experience import SqliteStore, episode_files
from agentrl.experience.episode_files import COLUMNS, ExportedEpisode, load_export, write_lines, write_parquet
from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.records import Group, GroupUse, codec
from agentrl.testing.store_contract import make_group
from tests.strategies import examples, numbered, records

FILES = {"jsonl": write_lines, "parquet": write_parquet}
Write = Callable[[Iterable[ExportedEpisode], Path], int]


def stored(folder: Path, groups: list[Group]) -> list[ExportedEpisode]:
    """Returns the episodes of a store in which a step has used the first group."""
    with closing(SqliteStore(folder / "experience.sqlite")) as store:
        store.put_all(groups)
        if groups and groups[0].index >= 0 and not any(groups[0].pending):
            store.commit(0, {groups[0].index: GroupUse(reason="all_equal")}, "c")
        with EpisodeIndex(folder) as index:
            return [ExportedEpisode.of(record) for record in index.records(index.numbers(EpisodeQuery()))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
@given(groups=st.lists(records(Group), max_size=3))
@settings(max_examples=examples(40))
def test_any_episode_is_read_back_unchanged(kind: str, groups: list[Group]) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    with tempfile.TemporaryDirectory() as folder:
        episodes = stored(Path(folder), numbered(groups))
        path = Path(folder) / f"episodes.{kind}"
        assert FILES[kind](episodes, path) == len(episodes)
        # Compared as JSON, because NaN differs from itself.
        assert [codec.to_json(loaded) for loaded in load_export(path)] == [codec.to_json(episode) for episode in episodes]


def test_the_columns_match_the_documentation(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    episodes = stored(tmp_path, [make_group(index) for index in range(3)])
    write_parquet(episodes, tmp_path / "a.parquet")
    write_lines(episodes, tmp_path / "a.jsonl")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert {field.name: str(field.type) for field in table.schema} == COLUMNS
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [set(COLUMNS)] * 3
    assert lines[0]["state"] == "excluded" and lines[0]["unused"] == "all_equal" and lines[0]["step"] == 1
    assert lines[1]["episode"]["episode"]["id"] == episodes[1].row.id


def test_few_episodes_are_in_memory_at_a_time_and_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(episode_files, "_BATCH_CHARS", 1)
    episodes = stored(tmp_path, [make_group(index) for index in range(4)])
    write_parquet(iter(episodes), tmp_path / "a.parquet")
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 4

    def failing() -> Iterable[ExportedEpisode]:
        yield episodes[0]
        raise StoreError("damaged")

    for write, name in ((write_parquet, "b.parquet"), (write_lines, "b.jsonl")):
        with pytest.raises(StoreError):
            write(failing(), tmp_path / name)
    assert not list(tmp_path.glob("*b.*"))


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", '{"episode": {}}', "[" * 100_000, "\xff"])
def test_an_error_names_the_row_that_is_not_an_episode(tmp_path: Path, content: str) -> None:
    path = tmp_path / "episodes.jsonl"
    write_lines(stored(tmp_path, [make_group(0)]), path)
    with path.open("a", encoding="latin-1") as file:
        file.write(content + "\n")
    rows = load_export(path)
    assert next(rows).row.group == 0
    with pytest.raises(StoreError, match=r"of .*episodes.jsonl"):
        list(rows)


def test_a_file_that_is_not_an_export_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not an exported file"):
        list(load_export(tmp_path / "a.csv"))
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet PAR1")
    with pytest.raises(StoreError, match="row 0"):
        list(load_export(tmp_path / "a.parquet"))


@pytest.mark.slow
def test_datasets_reads_the_parquet_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    episodes = stored(tmp_path, [make_group(index) for index in range(4)])
    write_parquet(episodes, tmp_path / "episodes.parquet")
    table = datasets.load_dataset("parquet", data_files=str(tmp_path / "episodes.parquet"), cache_dir=str(tmp_path / "cache"))["train"]
    assert [ExportedEpisode.from_columns(row) for row in table] == episodes

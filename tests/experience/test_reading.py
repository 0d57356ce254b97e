"""The reader of a run's store: it returns the counts of the audit, and changes no file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import StoreError
from agentrl.experience import SqliteStore
from agentrl.experience.audit import count
from agentrl.experience.reading import StoreReader
from agentrl.records import Group, GroupUse, Score
from agentrl.records.late_score import PendingPart
from agentrl.testing.store_contract import make_group

REASONS = ("", "all_equal", "too_few: 1 scored episodes, 2 needed", "too_long in episode e7")


def waiting(group: Group, *, residual: bool) -> Group:
    """Returns the group with a score that waits for a part."""
    (scored,) = group.episodes
    part = PendingPart(name="review", residual=residual)
    return replace(group, episodes=(replace(scored, score=Score(value=None, pending=(part,), partial=0.5)),))


@given(
    st.lists(
        st.tuples(st.sampled_from(("plain", "parked", "residual")), st.sampled_from((None, 0, 1)), st.booleans(), st.sampled_from(REASONS)),
        max_size=7,
    )
)
def test_the_counts_of_the_reader_are_those_of_the_audit(
    tmp_path_factory: pytest.TempPathFactory, groups: list[tuple[str, int | None, bool, str]]
) -> None:
    """In every state, with and without late parts and residuals, and for every reason."""
    path = tmp_path_factory.mktemp("run") / "experience.sqlite"
    store = SqliteStore(path)
    for index, (form, _, _, _) in enumerate(groups):
        group = make_group(index)
        store.put(group if form == "plain" else waiting(group, residual=form == "residual"))
    free = {entry.index for entry in store.entries() if not entry.pending}
    for step in (0, 1):
        own = [index for index, (_, used_by, _, _) in enumerate(groups) if used_by == step and index in free]
        store.assign(step, own)
        uses = {
            index: GroupUse(tokens_trained=0 if groups[index][3] else 2, reason=groups[index][3])
            for index in own
            if step == 0 or groups[index][2]
        }
        if own and len(uses) == len(own):
            store.commit(step, uses, "c")
    reader = StoreReader(path)
    assert reader.counts() == count(store.entries())
    assert [reader.entry(entry.index) for entry in store.entries()] == list(store.entries())
    listed = reader.newest_entries(before=None, limit=100)
    assert list(listed) == list(store.entries())[::-1]
    assert reader.newest_entries(before=2, limit=1) == tuple(entry for entry in listed if entry.index < 2)[:1]
    reader.close()
    store.close()


def test_the_reader_changes_no_file_and_sees_the_writes_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "experience.sqlite"
    with pytest.raises(StoreError, match="no group has been stored yet"):
        StoreReader(path)
    assert list(tmp_path.iterdir()) == []
    store = SqliteStore(path)
    store.put(make_group(0))
    reader = StoreReader(path)
    before = reader.change_mark()
    store.put(make_group(1))
    after = reader.change_mark()
    assert after != before and after == reader.change_mark() and reader.groups([1]) == (make_group(1),)
    store.put(make_group(5))
    late = reader.change_mark()
    store.put(make_group(3))
    assert reader.change_mark() != late, "a group that finishes after a group with a larger index"
    with pytest.raises(StoreError):
        reader.put(make_group(2))
    reader.close()
    store.close()
    content = path.read_bytes()
    reader_after = StoreReader(path)
    assert reader_after.entry(1) is not None and reader_after.entry(7) is None
    reader_after.close()
    assert path.read_bytes() == content

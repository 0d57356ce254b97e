"""The uses of learner steps: one line per step, tied to a checkpoint by a hash, rebuilt from the ledger if the file is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import StoreError
from agentrl.experience.step_uses import (
    CONSUMED_FILE,
    NO_STEPS,
    append_step,
    extend_hash,
    hash_steps,
    ledger_steps,
    read_steps,
    recorded_steps,
    rewrite_steps,
)
from agentrl.records import GroupUse, LedgerEntry

use = st.builds(GroupUse, tokens_trained=st.integers(0, 1 << 40), reason=st.sampled_from(["", "all_equal", "näher\n"]))
steps = st.lists(st.dictionaries(st.integers(0, 1 << 40), use, max_size=4), max_size=6)


def entries_of(step_uses: list[dict[int, GroupUse]]) -> list[LedgerEntry]:
    plain = {"task_id": "t", "attempts": 1, "counted": 1, "has_spread": False, "oldest_version": 0, "tokens_sampled": 9}
    return [LedgerEntry(index=index, step=step, use=uses[index], **plain) for step, uses in enumerate(step_uses) for index in uses]


@given(step_uses=steps)
def test_steps_are_read_as_written_and_every_prefix_has_its_hash(
    tmp_path_factory: pytest.TempPathFactory, step_uses: list[dict[int, GroupUse]]
) -> None:
    folder, last = tmp_path_factory.mktemp("c"), NO_STEPS
    for count, uses in enumerate(step_uses):
        assert last == hash_steps(step_uses[:count])
        append_step(folder, uses)
        last = extend_hash(last, uses)
    assert read_steps(folder, len(step_uses)) == step_uses
    for count in range(len(step_uses) + 1):
        assert recorded_steps(folder, count, hash_steps(step_uses[:count]), []) == step_uses[:count]


STEPS = [{0: GroupUse(tokens_trained=5), 1: GroupUse(reason="all_equal")}, {2: GroupUse(tokens_trained=1)}]


@pytest.mark.parametrize("damage", ["lost", "torn", "changed"])
def test_a_damaged_file_is_replaced_by_the_ledger_if_that_has_the_hash(tmp_path: Path, damage: str) -> None:
    rewrite_steps(tmp_path, STEPS)
    path = tmp_path / CONSUMED_FILE
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5] if damage == "torn" else path.read_bytes().replace(b"5", b"6"))
    sha256, entries = hash_steps(STEPS), entries_of(STEPS)
    assert recorded_steps(tmp_path, 2, sha256, entries) == STEPS == ledger_steps(entries, 2)
    with pytest.raises(StoreError, match=r"consumed\.jsonl and the ledger both differ from the steps of checkpoint 2"):
        recorded_steps(tmp_path, 2, sha256, entries[1:])
    assert recorded_steps(tmp_path, 0, NO_STEPS, entries) == []

"""The shards of a forest in a team of ranks. test_engine tests the computation, on real ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from agentrl.errors import UserError
from agentrl.learner.packing import build_micro_batch
from agentrl.learner.ranks import Team
from agentrl.learner.ulysses import TokenShard, check_heads
from tests.learner.building import tiny_config
from tests.learner.test_forest import CPU, _samples


def team(rank: int, size: int) -> Team:
    return Team(rank=rank, size=size, group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]  # nothing is sent here


@given(st.integers(1, 40), st.integers(1, 6), st.data())
def test_each_token_and_prediction_belongs_to_one_rank(length: int, size: int, data: st.DataObject) -> None:
    positions = torch.tensor(sorted(data.draw(st.lists(st.integers(0, length - 1), max_size=20))), dtype=torch.long)
    shards = [TokenShard.of(team(rank, size), length, positions) for rank in range(size)]
    tokens = torch.arange(1, length + 1)
    parts = [shard.part(tokens) for shard in shards]
    assert {len(part) for part in parts} == {shards[0].width}
    assert torch.cat(parts)[:length].tolist() == tokens.tolist()
    assert not torch.cat(parts)[length:].any()
    assert torch.cat([positions[shard.own] for shard in shards]).tolist() == positions.tolist()
    for shard in shards:
        local = positions[shard.own] - shard.start
        assert ((local >= 0) & (local < shard.width)).all()


def test_shards_add_up_to_the_micro_batch() -> None:
    rows = tuple(_samples(1))
    full = build_micro_batch(rows, CPU)
    parts = [build_micro_batch(rows, CPU, team=team(rank, 3)) for rank in range(3)]
    assert torch.equal(torch.cat([part.targets for part in parts]), full.targets)
    assert torch.equal(torch.cat([part.input_ids[0] for part in parts])[: full.layout.length], full.input_ids[0])
    assert torch.equal(torch.cat([part.layout.positions for part in parts])[: full.layout.length], full.layout.positions)
    for part in parts:
        assert torch.equal(part.expand, full.expand) and torch.equal(part.advantages, full.advantages)


def test_indivisible_heads_raise() -> None:
    check_heads(tiny_config(), team(0, 2))
    with pytest.raises(UserError, match=r"sequence_parallel=4 does not divide the model's 2 key heads"):
        check_heads(tiny_config(), team(0, 4))

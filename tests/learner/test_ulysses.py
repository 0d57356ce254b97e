"""How a team of ranks deals out a forest. What it computes is tested on real ranks, in test_engine."""

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
    stretches = [TokenShard.of(team(rank, size), length, positions) for rank in range(size)]
    tokens = torch.arange(1, length + 1)
    parts = [stretch.part(tokens) for stretch in stretches]
    assert {len(part) for part in parts} == {stretches[0].width}
    assert torch.cat(parts)[:length].tolist() == tokens.tolist()
    assert not torch.cat(parts)[length:].any()
    assert torch.cat([positions[stretch.own] for stretch in stretches]).tolist() == positions.tolist()
    for stretch in stretches:
        local = positions[stretch.own] - stretch.start
        assert ((local >= 0) & (local < stretch.width)).all()


def test_shards_add_up_to_the_micro_batch() -> None:
    rows = tuple(_samples(1))
    whole = build_micro_batch(rows, CPU)
    parts = [build_micro_batch(rows, CPU, team=team(rank, 3)) for rank in range(3)]
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert torch.equal(torch.cat([part.input_ids[0] for part in parts])[: whole.layout.length], whole.input_ids[0])
    assert torch.equal(torch.cat([part.layout.positions for part in parts])[: whole.layout.length], whole.layout.positions)
    for part in parts:
        assert torch.equal(part.expand, whole.expand) and torch.equal(part.advantages, whole.advantages)


def test_indivisible_heads_raise() -> None:
    check_heads(tiny_config(), team(0, 2))
    with pytest.raises(UserError, match=r"sequence_parallel=4 does not divide the model's 2 key heads"):
        check_heads(tiny_config(), team(0, 4))

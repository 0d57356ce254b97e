from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import LearnerError
from agentrl.learner.packing import build_micro_batch, check_vocabulary, plan_micro_batches, split_minibatches
from agentrl.records import Batch, Sample

CPU = torch.device("cpu")


def _sample(name: int, length: int, group: int = 0, first: int = 0) -> Sample:
    mask = tuple(t > 0 for t in range(length))
    return Sample(
        episode_id=str(name),
        group_index=group,
        token_ids=tuple(range(first, first + length)),
        loss_mask=mask,
        logprobs=tuple(-float(t) for t in range(length)),
        advantages=tuple(float(on) for on in mask),
        versions=tuple(0 if on else -1 for on in mask),
    )


@given(st.lists(st.tuples(st.integers(2, 60), st.integers(0, 3)), max_size=40), st.integers(1, 4), st.integers(60, 200))
def test_each_sample_is_planned_once_and_ranks_get_equally_many_micro_batches(
    shapes: list[tuple[int, int]], ranks: int, budget: int
) -> None:
    samples = [_sample(number, length, first=first) for number, (length, first) in enumerate(shapes)]
    plans = [plan_micro_batches(samples, rank=rank, ranks=ranks, max_tokens=budget) for rank in range(ranks)]
    assert len({len(plan) for plan in plans}) == 1
    planned = [sample.episode_id for plan in plans for rows in plan for sample in rows]
    assert sorted(planned) == sorted(sample.episode_id for sample in samples)
    for rows in (rows for plan in plans for rows in plan if rows):
        assert build_micro_batch(rows, CPU).input_ids.shape[1] <= budget


def test_micro_batches_have_even_sizes() -> None:
    plan = plan_micro_batches([_sample(n, 10, first=n) for n in range(8)], rank=0, ranks=1, max_tokens=70)
    assert sorted(len(rows) for rows in plan) == [4, 4]


def test_a_sample_above_the_budget_gets_its_own_micro_batch() -> None:
    plan = plan_micro_batches([_sample(0, 50), _sample(1, 5, first=7)], rank=0, ranks=1, max_tokens=20)
    assert [[sample.episode_id for sample in rows] for rows in plan] == [["0"], ["1"]]


def test_positions_index_the_token_before_each_trained_one() -> None:
    batch = build_micro_batch((_sample(0, 4, first=5), _sample(1, 2)), CPU)
    assert batch.input_ids.tolist() == [[0, 1, 5, 6, 7, 8]]
    assert batch.layout.positions.tolist() == [0, 1, 0, 1, 2, 3]
    predictions = batch.positions[batch.expand].tolist(), batch.targets[batch.expand].tolist()
    assert predictions == ([2, 3, 4, 0], [6, 7, 8, 1])
    assert batch.behaviour.tolist() == [-1.0, -2.0, -3.0, -1.0]
    assert batch.sequence.tolist() == [0, 0, 0, 1]
    assert build_micro_batch((_sample(0, 4), _sample(1, 2)), torch.device("cpu"), [7, 5]).sequence.tolist() == [7, 7, 7, 5]


def test_shared_tokens_are_stored_once_and_samples_keep_their_values() -> None:
    """Two samples that differ only in their last token, and one that equals the first."""
    first, twin = _sample(0, 4), _sample(2, 4)
    other = replace(_sample(1, 4), token_ids=(0, 1, 2, 9), logprobs=(0.0, -5.0, -6.0, -7.0))
    batch = build_micro_batch((first, other, twin), CPU)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 9]]
    assert list(zip(batch.positions.tolist(), batch.targets.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 3), (2, 9)]
    assert batch.expand.tolist() == [0, 1, 2, 0, 1, 3, 0, 1, 2]
    assert batch.behaviour.tolist() == [-1.0, -2.0, -3.0, -5.0, -6.0, -7.0, -1.0, -2.0, -3.0]


def test_an_empty_micro_batch_is_untrained_padding() -> None:
    assert plan_micro_batches([], rank=0, ranks=2, max_tokens=64) == []
    batch = build_micro_batch((), CPU)
    assert batch.input_ids.shape == (1, 2)
    assert batch.positions.shape == batch.targets.shape == batch.expand.shape == (0,)


@pytest.mark.parametrize("token", [97, -1])
def test_a_token_outside_the_vocabulary_raises_with_its_episode(token: int) -> None:
    good, bad = _sample(0, 5, first=92), replace(_sample(1, 3), token_ids=(0, token, 2))
    check_vocabulary([good], 97)
    check_vocabulary([], 97)
    with pytest.raises(LearnerError, match=rf"episode 1 contains token {token}, but the policy's vocabulary has 97"):
        check_vocabulary([good, bad], 97)


def test_minibatches_split_the_groups_and_have_separate_denominators() -> None:
    samples = tuple(_sample(group, length, group) for group, length in ((10, 3), (11, 5), (12, 7)))
    batch = Batch(step=0, samples=samples, denominator=12, group_indices=(10, 11, 12, 13))
    parts = split_minibatches(batch, 2)
    assert [part.group_indices for part in parts] == [(10, 12), (11, 13)]
    assert [part.denominator for part in parts] == [8, 4]
    assert [part.group_indices for part in split_minibatches(batch, 4)] == [(10,), (11,), (12,)]

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.packing import micro_batch, minibatches, plan
from agentrl.records import Batch, Sample


def _sample(name: int, length: int, group: int = 0) -> Sample:
    mask = tuple(t > 0 for t in range(length))
    return Sample(
        episode_id=str(name),
        group_index=group,
        token_ids=tuple(range(length)),
        loss_mask=mask,
        logprobs=tuple(-float(t) for t in range(length)),
        advantages=tuple(float(on) for on in mask),
        versions=tuple(0 if on else -1 for on in mask),
    )


@given(st.lists(st.integers(2, 60), max_size=40), st.integers(1, 4), st.integers(60, 200))
def test_every_sample_is_on_one_rank_once_and_ranks_run_equally_many_micro_batches(lengths: list[int], ranks: int, budget: int) -> None:
    samples = [_sample(number, length) for number, length in enumerate(lengths)]
    plans = [plan(samples, rank=rank, ranks=ranks, max_tokens=budget) for rank in range(ranks)]
    assert len({len(made) for made in plans}) == 1
    dealt = [sample.episode_id for made in plans for rows in made for sample in rows]
    assert sorted(dealt) == sorted(sample.episode_id for sample in samples)
    for rows in (rows for made in plans for rows in made if rows):
        assert len(rows) * max(len(sample.token_ids) for sample in rows) <= budget


def test_a_row_longer_than_the_budget_is_alone() -> None:
    made = plan([_sample(0, 50), _sample(1, 5)], rank=0, ranks=1, max_tokens=20)
    assert [[sample.episode_id for sample in rows] for rows in made] == [["0"], ["1"]]


def test_tensors_pick_the_token_before_each_trained_one() -> None:
    made = micro_batch((_sample(0, 4), _sample(1, 2)), torch.device("cpu"))
    assert made.input_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert made.positions.tolist() == [0, 1, 2, 4]
    assert made.targets.tolist() == [1, 2, 3, 1]
    assert made.behaviour.tolist() == [-1.0, -2.0, -3.0, -1.0]
    assert made.sequence.tolist() == [0, 0, 0, 1]
    assert micro_batch((_sample(0, 4), _sample(1, 2)), torch.device("cpu"), [7, 5]).sequence.tolist() == [7, 7, 7, 5]


def test_no_rows_are_a_row_of_padding_that_trains_nothing() -> None:
    made = micro_batch((), torch.device("cpu"))
    assert made.input_ids.shape == (1, 2)
    assert made.positions.shape == made.targets.shape == (0,)


def test_minibatches_share_the_groups_and_have_their_own_denominators() -> None:
    samples = tuple(_sample(group, length, group) for group, length in ((10, 3), (11, 5), (12, 7)))
    batch = Batch(step=0, samples=samples, denominator=12, group_indices=(10, 11, 12, 13))
    parts = minibatches(batch, 2)
    assert [part.group_indices for part in parts] == [(10, 12), (11, 13)]
    assert [part.denominator for part in parts] == [8, 4]
    assert [part.group_indices for part in minibatches(batch, 4)] == [(10,), (11,), (12,)]

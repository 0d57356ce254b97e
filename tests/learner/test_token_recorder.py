"""The recorded tokens of a step have the values that its loss computed, sample by sample."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from agentrl.experience.token_records import read_records
from agentrl.records import Sample


def samples(seed: int) -> list[Sample]:
    """Samples of two groups; one episode has two samples."""
    draw = random.Random(seed)
    rows = []
    for group, episode in ((3, "a"), (3, "b"), (3, "b"), (5, "a")):
        size = draw.randint(4, 9)
        mask = (False, *(draw.random() < 0.6 for _ in range(size - 2)), True)
        rows.append(
            Sample(
                episode_id=episode,
                group_index=group,
                token_ids=tuple(draw.randint(0, 50) for _ in range(size)),
                loss_mask=mask,
                logprobs=tuple(-draw.random() if on else 0.0 for on in mask),
                versions=tuple(0 if on else -1 for on in mask),
                advantages=tuple(draw.uniform(-1, 1) if on else 0.0 for on in mask),
            )
        )
    return rows


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 1), (2, 0, 2)])
def test_each_sample_has_the_values_of_its_own_tokens(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """In any order of the samples, and in any division into micro-batches, one of which may be empty."""
    import torch

    from agentrl.config.objective import ObjectiveConfig
    from agentrl.learner.packing import build_micro_batch
    from agentrl.learner.token_recorder import TokenRecorder
    from agentrl.objective.policy_loss import TrainedTokens, policy_loss

    rows, recorder, objective = samples(len(cuts)), TokenRecorder(tmp_path, 0), ObjectiveConfig(clip_low=0.1, clip_high=0.1)
    order = random.Random(1).sample(range(len(rows)), len(rows))
    expected: dict[tuple[int, str, int], list[tuple[float, ...]]] = {}
    parts = [
        sum(other.group_index == row.group_index and other.episode_id == row.episode_id for other in rows[:at])
        for at, row in enumerate(rows)
    ]
    torch.manual_seed(0)
    for size in cuts:
        numbers, order = order[:size], order[size:]
        batch = build_micro_batch(tuple(rows[number] for number in numbers), torch.device("cpu"), numbers)
        logprobs = (batch.behaviour + 0.3 * torch.randn_like(batch.behaviour)).requires_grad_()
        entropy = torch.rand_like(batch.behaviour)
        tokens = TrainedTokens(
            logprobs=logprobs, behaviour=batch.behaviour, advantages=batch.advantages, sequence=batch.sequence, entropy=entropy
        )
        result = policy_loss(tokens, objective, denominator=10.0)
        recorder.add(rows, batch.sequence, logprobs, entropy, result)
        columns = zip(
            batch.sequence.tolist(), logprobs.tolist(), entropy.tolist(), result.weight.tolist(), result.clipped.tolist(), strict=True
        )
        for number, *values in columns:
            row = rows[number]
            expected.setdefault((row.group_index, row.episode_id, parts[number]), []).append(tuple(values))
    recorder.save(8)
    records = {(record.group, record.episode_id, record.part): record for group in (3, 5) for record in read_records(tmp_path, 8, group)}
    assert records.keys() == expected.keys() and len(records) == 4
    for key, record in records.items():
        assert list(zip(record.logprobs, record.entropies, record.weights, record.clipped, strict=True)) == expected[key]
        row = next(row for number, row in enumerate(rows) if (row.group_index, row.episode_id, parts[number]) == key)
        assert len(record.logprobs) == sum(row.loss_mask)
    clipped = [flag for record in records.values() for flag in record.clipped]
    assert any(clipped) and not all(clipped)
    recorder.save(9)
    assert read_records(tmp_path, 9, 3) == [], "a step records only its own tokens"


def test_a_full_disk_does_not_stop_the_learner(tmp_path: Path, caplog: Any) -> None:
    from agentrl.learner.token_recorder import TokenRecorder

    (tmp_path / "updates").write_text("a file where the folder should be")
    recorder = TokenRecorder(tmp_path, 0)
    recorder.save(1)
    recorder.save(2)
    assert caplog.text.count("were not recorded") == 1

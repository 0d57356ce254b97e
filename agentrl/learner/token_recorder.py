"""Records what an update computes for each trained token, for later inspection (`agentrl.experience.token_records`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from agentrl.experience.token_records import TokenRecord, write_records
from agentrl.objective.policy_loss import PolicyLoss
from agentrl.records import Sample

log = logging.getLogger("agentrl.learner")


class TokenRecorder:
    """Collects the tokens of this rank's micro-batches during a step, and writes them at the end of the step.

    Until then, the tensors stay on their device (four float32 values per trained token), so recording adds no synchronization to a
    micro-batch.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._parts: list[tuple[Sequence[Sample], Tensor, Tensor]] = []
        self._failed = False

    def add(self, samples: Sequence[Sample], sequence: Tensor, logprobs: Tensor, entropy: Tensor | None, result: PolicyLoss) -> None:
        """Adds the tokens of a micro-batch.

        Args:
            samples: the samples that the indices in `sequence` refer to.
            sequence: [N] index of each token's sample.
            logprobs: [N] logprobs under the trained policy; `entropy` is under the same policy.
        """
        unknown = torch.full_like(logprobs, torch.nan, dtype=torch.float32)
        columns = (logprobs, unknown if entropy is None else entropy, result.weight, result.clipped)
        self._parts.append((samples, sequence, torch.stack([column.detach().float() for column in columns])))

    def save(self, step: int) -> None:
        """Writes the step's tokens, then removes them from memory. An error does not stop the run, and only the first error is logged.

        Args:
            step: number of the version that the step produces.
        """
        parts, self._parts = self._parts, []
        try:
            write_records(self._run_dir, step, self._rank, [record for part in parts for record in _records(*part)])
        except (OSError, ValueError) as error:
            if not self._failed:
                log.warning("the tokens of step %d were not recorded, so agentrl view shows no ratios: %s", step, error)
            self._failed = True


def _records(samples: Sequence[Sample], sequence: Tensor, columns: Tensor) -> list[TokenRecord]:
    if not len(sequence):  # a micro-batch without samples, which exists only for collectives
        return []
    seen, places = Counter[tuple[int, str]](), []
    for sample in samples:
        key = (sample.group_index, sample.episode_id)
        places.append((*key, seen[key]))
        seen[key] += 1
    numbers, counts = torch.unique_consecutive(sequence.cpu(), return_counts=True)
    records = []
    for number, own in zip(numbers.tolist(), torch.split(columns.cpu(), counts.tolist(), dim=1), strict=True):
        group, episode, part = places[number]
        logprobs, entropies, weights, clipped = own.tolist()
        records.append(
            TokenRecord(
                group=group,
                episode_id=episode,
                part=part,
                logprobs=logprobs,
                entropies=entropies,
                weights=weights,
                clipped=[value == 1.0 for value in clipped],
            )
        )
    return records

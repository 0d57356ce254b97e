"""One learner step: a batch of samples becomes one or more optimizer steps, and numbers that say how it went."""

from __future__ import annotations

import math
import time
from statistics import fmean, pstdev

import torch
from torch import Tensor

from agentrl.errors import LearnerError
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.packing import MicroBatch, Rows, micro_batch, minibatches, plan
from agentrl.objective.losses import MAX_NAMES, SUM_NAMES, policy_loss, summarize
from agentrl.records import Batch, Sample


class Updater:
    """Applies batches to an engine and counts the optimizer steps that had to be set aside.

    `bad_in_a_row` belongs to the checkpoint: a run that keeps dying and resuming must still stop after `learner.max_bad_updates`.
    """

    def __init__(self, engine: PolicyEngine, *, bad_in_a_row: int = 0) -> None:
        self.engine = engine
        self.bad_in_a_row = bad_in_a_row
        self._objective = engine.recipe.objective
        self._learner = engine.recipe.learner

    def update(self, batch: Batch) -> dict[str, float]:
        """Trains on `batch` and returns its metrics; all ranks call it with the same batch and get the same answer.

        A minibatch whose gradient is not finite is set aside: weights untouched, counted in `updates_set_aside`. Raises
        `LearnerError` after `learner.max_bad_updates` of those in a row. A batch without samples changes nothing.
        """
        start = time.perf_counter()
        parts = minibatches(batch, self._learner.minibatches)
        passes: list[dict[str, float]] = []
        prepared = self._prepare(parts)
        for part, micro_batches, proximal in prepared:
            passes.append(self._optimize(part, micro_batches, proximal))
        wall_s = time.perf_counter() - start
        metrics = _batch_metrics(batch)
        metrics["lr"] = learning_rate(self._learner, self.engine.recipe.steps, batch.step)
        metrics["optimizer_steps"] = sum(made["applied"] for made in passes)
        metrics["updates_set_aside"] = sum(1.0 - made.pop("applied") for made in passes)
        for name in sorted({name for made in passes for name in made}):
            values = [made[name] for made in passes if name in made]
            metrics[name] = max(values) if name.endswith("_max") else fmean(values)
        mine = sum(one.input_ids.numel() for _, made, _ in prepared for one in made)
        metrics["tokens_computed"] = self.engine.ranks.sum(torch.tensor([mine])).item()
        metrics["update_s"] = wall_s
        metrics["tokens_per_s"] = metrics["tokens"] / wall_s
        return metrics

    def _prepare(self, parts: list[Batch]) -> list[tuple[Batch, list[MicroBatch], list[Tensor | None]]]:
        """Micro-batches and, when the batch makes several optimizer steps, the logprobs of the weights it starts from."""
        ranks = self.engine.ranks
        prepared = []
        for part in parts:
            share, budget = self._learner.share_prefixes, self._learner.max_tokens_per_microbatch
            rows: list[Rows] = plan(part.samples, rank=ranks.rank, ranks=ranks.size, max_tokens=budget, share=share)
            made = [micro_batch(some, ranks.device, share=share) for some in rows]
            proximal: list[Tensor | None] = [self._frozen(one) if len(parts) > 1 else None for one in made]
            prepared.append((part, made, proximal))
        return prepared

    @torch.no_grad()
    def _frozen(self, batch: MicroBatch) -> Tensor:
        return self.engine.logprobs(batch)[0]

    def _optimize(self, part: Batch, micro_batches: list[MicroBatch], proximal: list[Tensor | None]) -> dict[str, float]:
        ranks = self.engine.ranks
        sums = torch.zeros(len(SUM_NAMES) + 1, dtype=torch.float64, device=ranks.device)
        maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=ranks.device)
        for batch, centre in zip(micro_batches, proximal, strict=True):
            logprobs, entropy = self.engine.logprobs(batch)
            result = policy_loss(
                logprobs,
                batch.behaviour,
                batch.advantages,
                torch.ones_like(batch.behaviour, dtype=torch.bool),
                denominator=part.denominator,
                clip_low=self._objective.clip_low,
                clip_high=self._objective.clip_high,
                is_cap=self._objective.is_cap,
                proximal=centre,
                entropy=entropy.detach(),
            )
            self.engine.backward(result.loss)
            sums[:-1] += result.sums
            sums[-1] += result.loss.detach()
            maxima = torch.maximum(maxima, result.maxima)
        applied, norm = self.engine.step(part.step)
        self._count(applied, part.step)
        total = ranks.sum(sums)
        metrics = {**summarize(total[:-1], ranks.max(maxima)), "loss": total[-1].item(), "grad_norm": norm}
        return {name: value for name, value in metrics.items() if math.isfinite(value)} | {"applied": float(applied)}

    def _count(self, applied: bool, step: int) -> None:
        self.bad_in_a_row = 0 if applied else self.bad_in_a_row + 1
        if self.bad_in_a_row >= self._learner.max_bad_updates:
            raise LearnerError(
                f"step {step}: the gradient was not finite {self.bad_in_a_row} times in a row; the weights are those of the last"
                " good update. Lower learner.lr, or look for damaged weights or experience"
            )


def _batch_metrics(batch: Batch) -> dict[str, float]:
    lengths = [len(sample.token_ids) for sample in batch.samples]
    metrics = {
        "groups": float(len(batch.group_indices)),
        "groups_trained": float(len({sample.group_index for sample in batch.samples})),
        "samples": float(len(batch.samples)),
        "tokens": float(sum(lengths)),
        "tokens_trained": float(batch.denominator),
    }
    if batch.samples:
        lags = [batch.step - version for sample in batch.samples for version in sample.versions if version >= 0]
        advantages = [_advantage(sample) for sample in batch.samples]
        metrics |= {
            "length_max": float(max(lengths)),
            "staleness_mean": fmean(lags),
            "staleness_max": float(max(lags)),
            "advantage_std": pstdev(advantages),
        }
    return metrics


def _advantage(sample: Sample) -> float:
    return sample.advantages[sample.loss_mask.index(True)]

"""One learner step: a batch of samples becomes one or more optimizer steps, and numbers that say how it went."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

import torch
from torch import Tensor

from agentrl.errors import LearnerError
from agentrl.learner.critic import Critic, advantage_scale, critic_metrics
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.packing import MicroBatch, Rows, micro_batch, minibatches, plan
from agentrl.learner.reference import reference_for
from agentrl.objective.aggregate import denominator
from agentrl.objective.combined import TrainedTokens, policy_loss
from agentrl.objective.kl import sequence_penalty
from agentrl.objective.metrics import MAX_NAMES, SUM_NAMES, summarize
from agentrl.records import Batch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A micro-batch with the logprobs [N] of its tokens under the other policies of the objective, and what a critic makes of them."""

    batch: MicroBatch
    proximal: Tensor | None
    reference: Tensor | None
    returns: Tensor | None = None  # [N]
    values: Tensor | None = None  # [N] before the step


Plan = list[tuple[Batch, list[Prepared]]]  # the micro-batches of each optimizer step


class Updater:
    """Applies batches to an engine and counts the optimizer steps that had to be set aside.

    `bad_in_a_row` belongs to the checkpoint: a run that keeps dying and resuming must still stop after `learner.max_bad_updates`.
    """

    def __init__(self, engine: PolicyEngine, *, critic: Critic | None = None, bad_in_a_row: int = 0) -> None:
        self.engine = engine
        self.critic = critic
        self.bad_in_a_row = bad_in_a_row
        self._objective = engine.recipe.objective
        self._learner = engine.recipe.learner
        self._constant_length = self._objective.constant_length or engine.recipe.policy.max_model_len
        uses_reference = self._objective.kl != "none"
        self._reference = reference_for(engine) if uses_reference else None

    def update(self, batch: Batch) -> dict[str, float]:
        """Trains on `batch` and returns its metrics; all ranks call it with the same batch and get the same answer.

        A minibatch whose gradient is not finite is set aside: weights untouched, counted in `updates_set_aside`. Raises
        `LearnerError` after `learner.max_bad_updates` of those in a row. A batch without samples changes nothing.
        """
        start = time.perf_counter()
        parts = minibatches(batch, self._learner.minibatches)
        prepared = self._prepare(parts)
        metrics = _batch_metrics(batch)
        if self.critic is not None:
            prepared, found = self._judged(prepared, self.critic)
            metrics |= found | self._learn_values(prepared, self.critic)
        passes: list[dict[str, float]] = []
        if self.critic is None or batch.step >= self.critic.config.warmup_steps:
            for part, made in prepared:
                passes.append(self._optimize(part, made))
        wall_s = time.perf_counter() - start
        metrics["lr"] = learning_rate(self._learner, self.engine.recipe.steps, batch.step)
        metrics["optimizer_steps"] = sum(made["applied"] for made in passes)
        metrics["updates_set_aside"] = sum(1.0 - made.pop("applied") for made in passes)
        for name in sorted({name for made in passes for name in made}):
            values = [made[name] for made in passes if name in made]
            metrics[name] = max(values) if name.endswith("_max") else fmean(values)
        mine = sum(one.batch.layout.length for _, made in prepared for one in made)
        metrics["tokens_computed"] = self.engine.ranks.sum(torch.tensor([mine])).item()
        metrics["update_s"] = wall_s
        metrics["tokens_per_s"] = metrics["tokens"] / wall_s
        return metrics

    def penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """What `objective.kl=k1_reward` takes off the score of each episode, by id; empty with any other objective. A collective."""
        if self._objective.kl != "k1_reward":
            return {}
        assert self._reference is not None, "a KL term loads the reference"
        ranks = self.engine.ranks
        total = torch.zeros(len(samples), dtype=torch.float64, device=ranks.device)
        for batch in self._micro_batches(samples):
            total += sequence_penalty(batch.behaviour, self._reference.logprobs(batch), batch.sequence, len(samples))
        found: dict[str, float] = defaultdict(float)
        for sample, value in zip(samples, ranks.sum(total).tolist(), strict=True):
            found[sample.episode_id] += self._objective.kl_coef * value
        return dict(found)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """This rank's micro-batches; their tokens carry the place of their sample in `samples`."""
        ranks = self.engine.ranks
        places = {id(sample): place for place, sample in enumerate(samples)}
        share, budget = self._learner.share_prefixes, self._learner.max_tokens_per_microbatch * self._learner.sequence_parallel
        rows: list[Rows] = plan(samples, rank=ranks.share, ranks=ranks.shares, max_tokens=budget, share=share)
        return [micro_batch(some, ranks.device, [places[id(row)] for row in some], share=share, team=ranks.team) for some in rows]

    def _prepare(self, parts: list[Batch]) -> Plan:
        """Micro-batches with what the objective needs of other policies, all computed before the first optimizer step."""
        recomputes = self._recomputes(len(parts))
        in_loss = self._reference if self._objective.kl != "k1_reward" else None
        return [
            (
                part,
                [
                    Prepared(
                        batch=batch,
                        proximal=self._frozen(batch) if recomputes else None,
                        reference=None if in_loss is None else in_loss.logprobs(batch),
                    )
                    for batch in self._micro_batches(part.samples)
                ],
            )
            for part in parts
        ]

    def _recomputes(self, parts: int) -> bool:
        """A batch that turns out to make a single optimizer step needs no proximal policy, unless the correction weighs one."""
        needed = self._objective.correction == "mask" or self._objective.is_level == "sequence"
        return self._objective.recomputes(self._learner.minibatches if needed else parts)

    def _judged(self, prepared: Plan, critic: Critic) -> tuple[Plan, dict[str, float]]:
        """The same micro-batches with the critic's advantages in place of rewards, and how good the critic was."""
        ranks = self.engine.ranks
        judged = [(part, [_with_values(one, *critic.judge(one.batch)) for one in made]) for part, made in prepared]
        everything = [one for _, made in judged for one in made]
        metrics = critic_metrics([(one.returns, one.values) for one in everything], ranks)
        shift, scale = advantage_scale([one.batch.advantages for one in everything], ranks)
        metrics["advantage_std"] = scale
        if self._objective.divides_by_std:
            judged = [(part, [_scaled(one, shift, scale) for one in made]) for part, made in judged]
        return judged, metrics

    def _learn_values(self, prepared: Plan, critic: Critic) -> dict[str, float]:
        """`critic.epochs` times an optimizer step of the critic for each part."""
        ranks = self.engine.ranks
        losses, norms = [], []
        for part, made in prepared * critic.config.epochs:
            total = torch.zeros((), dtype=torch.float64, device=ranks.device)
            for one in made:
                assert one.returns is not None and one.values is not None, "judged before it is learned"
                total += critic.learn(one.batch, one.returns, one.values, denominator=float(part.denominator))
            applied, norm = critic.step(part.step)
            self._count(applied, part.step)
            losses.append(ranks.sum(total).item())
            norms.append(norm)
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics = {"value_loss": fmean(losses)} if losses else {}
        return metrics | ({"value_grad_norm": fmean(finite)} if finite else {})

    @torch.no_grad()
    def _frozen(self, batch: MicroBatch) -> Tensor:
        return self.engine.logprobs(batch)[0]

    def _optimize(self, part: Batch, micro_batches: list[Prepared]) -> dict[str, float]:
        ranks = self.engine.ranks
        sums = torch.zeros(len(SUM_NAMES) + 1, dtype=torch.float64, device=ranks.device)
        maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=ranks.device)
        total_weight = denominator(part.samples, self._objective.aggregation, length=self._constant_length)
        for one in micro_batches:
            logprobs, entropy = self.engine.logprobs(one.batch)
            tokens = TrainedTokens(
                logprobs=logprobs,
                behaviour=one.batch.behaviour,
                advantages=one.batch.advantages,
                sequence=one.batch.sequence,
                proximal=one.proximal,
                reference=one.reference,
                entropy=entropy,
            )
            result = policy_loss(tokens, self._objective, denominator=total_weight)
            self.engine.backward(result.loss)
            sums[:-1] += result.sums
            sums[-1] += result.loss.detach()
            maxima = torch.maximum(maxima, result.maxima)
        applied, norm = self.engine.step(part.step)
        self._count(applied, part.step)
        total = ranks.sum(sums)
        with_reference = self._objective.kl in ("k1", "k2", "k3")
        metrics = {**summarize(total[:-1], ranks.max(maxima), with_reference=with_reference), "loss": total[-1].item(), "grad_norm": norm}
        return {name: value for name, value in metrics.items() if math.isfinite(value)} | {"applied": float(applied)}

    def _count(self, applied: bool, step: int) -> None:
        self.bad_in_a_row = 0 if applied else self.bad_in_a_row + 1
        if self.bad_in_a_row >= self._learner.max_bad_updates:
            raise LearnerError(
                f"step {step}: the gradient was not finite {self.bad_in_a_row} times in a row; the weights are those of the last"
                " good update. Lower learner.lr, or look for damaged weights or experience"
            )


def _with_values(one: Prepared, advantages: Tensor, returns: Tensor, values: Tensor) -> Prepared:
    return replace(one, batch=replace(one.batch, advantages=advantages), returns=returns, values=values)


def _scaled(one: Prepared, shift: float, scale: float) -> Prepared:
    return replace(one, batch=replace(one.batch, advantages=(one.batch.advantages - shift) / scale))


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

"""One learner step: a batch of samples becomes one or more optimizer steps, and metrics."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from statistics import fmean, pstdev

import torch
from torch import Tensor

from agentrl.config.recipe import CriticConfig
from agentrl.learner.critic import Critic, SharedCritic, advantage_moments, critic_advantages, critic_metrics
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.kl_reference import kl_reference_for
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.packing import MicroBatch, Rows, build_micro_batch, check_vocabulary, plan_micro_batches, split_minibatches
from agentrl.learner.update_guard import UpdateGuard
from agentrl.objective.aggregate import loss_denominator
from agentrl.objective.kl import sequence_penalty
from agentrl.objective.metrics import MAX_NAMES, SUM_NAMES, combine_steps, summarize
from agentrl.objective.policy_loss import TrainedTokens, load_loss, policy_loss
from agentrl.objective.values import value_loss
from agentrl.records import Batch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMicroBatch:
    """A micro-batch with its tokens' logprobs [N] under the objective's other policies, and the critic's results."""

    batch: MicroBatch
    piece: int  # index of the critic's optimizer step that it belongs to
    piece_tokens: int  # trained tokens of that step, on all ranks
    proximal: Tensor | None
    reference: Tensor | None
    returns: Tensor | None = None  # [N]
    values: Tensor | None = None  # [N] before the step


Plan = list[tuple[Batch, list[PreparedMicroBatch]]]  # the micro-batches of each optimizer step


class Updater:
    """Applies batches to an engine. Its `guard` judges each optimizer step and records what was left out."""

    def __init__(self, engine: PolicyEngine, *, critic: Critic | None = None) -> None:
        self.engine = engine
        config = engine.recipe.critic
        self.critic: Critic | SharedCritic | None = SharedCritic(engine) if config is not None and config.shared else critic
        self.guard = UpdateGuard(engine.recipe.learner)
        self._objective = engine.recipe.objective
        self._loss = load_loss(self._objective)
        self._learner = engine.recipe.learner
        self._constant_length = self._objective.constant_length or engine.recipe.policy.max_model_len
        uses_reference = self._objective.kl != "none"
        self._reference = kl_reference_for(engine) if uses_reference else None

    def update(self, batch: Batch) -> dict[str, float]:
        """Trains on `batch` and returns its metrics; all ranks call it with the same batch and get the same result.

        A minibatch whose loss, gradient or advantages are not finite, or that breaks one of `learner.limits`, is left out: weights
        stay, and `updates_left_out` counts it. Where a limit says rollback, `guard.rolling_back` is True afterwards, and the weights
        must not be used. Raises `LearnerHalted` where a limit demands it, and after `learner.max_bad_updates` steps in a row were left
        out. A batch without samples changes nothing.
        """
        start = time.perf_counter()
        self.guard.begin_step()
        parts = split_minibatches(batch, self._learner.minibatches)
        prepared = self._prepare(parts)
        metrics = _batch_metrics(batch)
        warming = self.critic is not None and batch.step < self.critic.config.warmup_steps
        if self.critic is not None:
            prepared, judgement = self._judged(prepared, self.critic)
            metrics |= judgement
            if warming or isinstance(self.critic, Critic):
                metrics |= self._learn_values(prepared, self.critic)
        passes: list[dict[str, float]] = []
        if not warming:
            for part, made in prepared:
                if not self.guard.rolling_back:
                    passes.append(self._optimize(part, made, changed=any(one["applied"] for one in passes)))
        wall_s = time.perf_counter() - start
        metrics["lr"] = learning_rate(self._learner, self.engine.recipe.steps, self._schedule_step(batch.step))
        metrics["optimizer_steps"] = sum(made["applied"] for made in passes)
        metrics["updates_left_out"] = sum(1.0 - made.pop("applied") for made in passes)
        metrics |= combine_steps(passes, [part.denominator for part, _ in prepared[: len(passes)]])
        packed = [one.batch for _, made in prepared for one in made]
        mine = torch.tensor([sum(batch.layout.length for batch in packed), sum(len(batch.behaviour) for batch in packed)])
        metrics["tokens_computed"], metrics["tokens_delivered"] = map(float, self.engine.ranks.sum(mine).tolist())
        metrics["update_s"] = wall_s
        metrics["tokens_per_s"] = metrics["tokens"] / wall_s
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _schedule_step(self, step: int) -> int:
        """The learning rate schedule's step number, which a rollback sets back too."""
        return step - self.guard.counts.undone

    def score_penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """What `objective.kl=k1_reward` subtracts from each episode's score, by id; empty with any other objective. A collective."""
        if self._objective.kl != "k1_reward":
            return {}
        assert self._reference is not None, "a KL term needs the reference"
        ranks = self.engine.ranks
        total = torch.zeros(len(samples), dtype=torch.float64, device=ranks.device)
        for batch in self._micro_batches(samples):
            ranks.report_progress("computing a penalty", batch.layout.length)
            total += sequence_penalty(batch.behaviour, self._reference.logprobs(batch), batch.sequence, len(samples))
        penalties: dict[str, float] = defaultdict(float)
        for sample, value in zip(samples, ranks.sum(total).tolist(), strict=True):
            penalties[sample.episode_id] += self._objective.kl_coef * value
        return dict(penalties)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """This rank's micro-batches; their tokens carry the index of their sample in `samples`."""
        ranks = self.engine.ranks
        check_vocabulary(samples, self.engine.lm.config.get_text_config().vocab_size)
        numbers = {id(sample): number for number, sample in enumerate(samples)}
        share, budget = self._learner.share_prefixes, self._learner.max_tokens_per_microbatch * self._learner.sequence_parallel
        rows: list[Rows] = plan_micro_batches(
            samples, rank=ranks.data_parallel_rank, ranks=ranks.data_parallel_size, max_tokens=budget, share=share
        )
        return [build_micro_batch(some, ranks.device, [numbers[id(row)] for row in some], share=share, team=ranks.team) for some in rows]

    def _prepare(self, parts: list[Batch]) -> Plan:
        """Micro-batches with the other policies' logprobs that the objective needs, computed before the first optimizer step."""
        recomputes = self._recomputes(len(parts))
        return [(part, self._pieces(part, recomputes)) for part in parts]

    def _pieces(self, part: Batch, recomputes: bool) -> list[PreparedMicroBatch]:
        """The micro-batches of an optimizer step of the policy, in the order of the critic's smaller steps."""
        pieces = split_minibatches(part, 1 if self.critic is None else self.critic.config.minibatches)
        return [
            self._before(batch, number, piece.denominator, recomputes)
            for number, piece in enumerate(pieces)
            for batch in self._micro_batches(piece.samples)
        ]

    @torch.no_grad()
    def _before(self, batch: MicroBatch, piece: int, tokens: int, recomputes: bool) -> PreparedMicroBatch:
        """A micro-batch with the results of policy, critic and reference before the step; a shared trunk runs once for both."""
        self.engine.ranks.report_progress("computing reference logprobs", batch.layout.length)
        in_loss = self._reference if self._objective.kl != "k1_reward" else None
        proximal, values = None, None
        if recomputes and isinstance(self.critic, SharedCritic):
            proximal, _, values = self.critic.score(batch)
        else:
            proximal = self.engine.logprobs(batch)[0] if recomputes else None
            values = None if self.critic is None else self.critic.values(batch)
        return PreparedMicroBatch(
            batch=batch,
            piece=piece,
            piece_tokens=tokens,
            proximal=proximal,
            reference=None if in_loss is None else in_loss.logprobs(batch),
            values=values,
        )

    def _recomputes(self, parts: int) -> bool:
        """A batch with a single optimizer step needs no proximal policy, unless the correction uses one."""
        needed = self._objective.correction == "mask" or self._objective.is_level == "sequence"
        return self._objective.recomputes(self._learner.minibatches if needed else parts)

    def _judged(self, prepared: Plan, critic: Critic | SharedCritic) -> tuple[Plan, dict[str, float]]:
        """The same micro-batches with the advantages that the critic makes of rewards, and how good the critic was."""
        ranks = self.engine.ranks
        judged = [(part, [_judged(one, critic.config) for one in made]) for part, made in prepared]
        everything = [one for _, made in judged for one in made]
        metrics = critic_metrics([(one.returns, one.values) for one in everything], ranks)
        shift, scale = advantage_moments([one.batch.advantages for one in everything], ranks)
        if metrics:  # there was at least one token
            metrics["advantage_std"] = scale
        if self._objective.divides_by_std:
            judged = [(part, [_scaled(one, shift, scale) for one in made]) for part, made in judged]
        return judged, metrics

    def _learn_values(self, prepared: Plan, critic: Critic | SharedCritic) -> dict[str, float]:
        """`critic.epochs` times `critic.minibatches` optimizer steps of the critic for each part."""
        ranks = self.engine.ranks
        losses, norms = [], []
        for part, made in prepared * critic.config.epochs:
            for _, some in groupby(made, key=attrgetter("piece")):
                total = torch.zeros((), dtype=torch.float64, device=ranks.device)
                for one in some:
                    assert one.returns is not None and one.values is not None, "values are computed before they are learned"
                    ranks.report_progress("computing a micro-batch of the critic", one.batch.layout.length)
                    total += critic.learn(one.batch, one.returns, one.values, denominator=float(one.piece_tokens))
                ranks.report_progress("applying the critic's gradient")
                applied, norm = critic.step(self._schedule_step(part.step))
                losses.append(ranks.sum(total).item())
                self.guard.record_critic_step(part, {"value_loss": losses[-1], "value_grad_norm": norm}, applied=applied)
                norms.append(norm)
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics = {"value_loss": fmean(losses)} if losses else {}
        return metrics | ({"value_grad_norm": fmean(finite)} if finite else {})

    def _optimize(self, part: Batch, micro_batches: list[PreparedMicroBatch], *, changed: bool) -> dict[str, float]:
        """One optimizer step; `changed`: the weights have changed since the batch began."""
        ranks = self.engine.ranks
        sums = torch.zeros(len(SUM_NAMES) + 3, dtype=torch.float64, device=ranks.device)  # plus 2 losses, 1 count
        maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=ranks.device)
        total_weight = loss_denominator(part.samples, self._objective.aggregation, length=self._constant_length)
        for one in micro_batches:
            ranks.report_progress("computing a micro-batch", one.batch.layout.length)
            logprobs, entropy, values = self._forward(one.batch)
            tokens = TrainedTokens(
                logprobs=logprobs,
                behaviour=one.batch.behaviour,
                advantages=one.batch.advantages,
                sequence=one.batch.sequence,
                proximal=one.proximal,
                kl_reference=one.reference,
                on_policy=None if changed and one.proximal is None else one.batch.versions == part.step,
                entropy=entropy,
                rollout_tokens=one.batch.rollout_tokens,
            )
            result = policy_loss(tokens, self._objective, denominator=total_weight, surrogate=self._loss)
            value, weight = self._value_loss(one, values)
            value = value / part.denominator
            self.engine.backward(result.loss + weight * value if weight else result.loss)
            sums[:-3] += result.sums
            sums[-3] += value.detach()
            sums[-2] += result.loss.detach()
            sums[-1] += (~one.batch.advantages.isfinite()).sum()
            maxima = torch.maximum(maxima, result.maxima)
        ranks.report_progress("applying the gradient")
        total = ranks.sum(sums)
        metrics = summarize(total[:-3], ranks.max(maxima), with_reference=self._objective.kl in ("k1", "k2", "k3"))
        if isinstance(self.critic, SharedCritic):
            metrics["value_loss"] = total[-3].item()
        metrics |= {"loss": total[-2].item(), "advantages_not_finite": total[-1].item()}
        applied, metrics["grad_norm"] = self.engine.step(self._schedule_step(part.step), refuse_above=self.guard.largest_norm(metrics))
        self.guard.record_policy_step(part, metrics, applied=applied)
        del metrics["advantages_not_finite"]
        return metrics | {"applied": float(applied)}

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logprobs, entropies and, from a shared trunk, values [N] of the batch's trained tokens."""
        if isinstance(self.critic, SharedCritic):
            return self.critic.score(batch)
        return *self.engine.logprobs(batch), None

    def _value_loss(self, one: PreparedMicroBatch, values: Tensor | None) -> tuple[Tensor, float]:
        """Sum over a micro-batch's tokens, and its weight in the total loss; 0 and 0 where the trunk has no value head."""
        if values is None:
            return torch.zeros((), device=self.engine.ranks.device), 0.0
        assert self.critic is not None and one.returns is not None and one.values is not None, "values are computed before they are learned"
        loss = value_loss(values, one.values, one.returns, clip=self.critic.config.value_clip)
        return loss.sum(), self.critic.config.vf_coef


def _judged(one: PreparedMicroBatch, config: CriticConfig) -> PreparedMicroBatch:
    assert one.values is not None, "the critic has computed its values"
    advantages, returns = critic_advantages(one.batch, one.values, config)
    return replace(one, batch=replace(one.batch, advantages=advantages), returns=returns)


def _scaled(one: PreparedMicroBatch, shift: float, scale: float) -> PreparedMicroBatch:
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
        metrics |= {
            "length_max": float(max(lengths)),
            "staleness_mean": fmean(lags),
            "staleness_max": float(max(lags)),
        }
    advantages = [sample.advantages[sample.loss_mask.index(True)] for sample in batch.samples if sample.advantages]
    if advantages:  # with a critic they are not known yet
        metrics["advantage_std"] = pstdev(advantages) if all(map(math.isfinite, advantages)) else math.nan
    return metrics

"""Performs one learner step: turns a batch of samples into optimizer steps and metrics."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter
from statistics import fmean, pstdev

import torch
from torch import Tensor

from agentrl.learner.critic import Critic, SharedCritic, advantage_moments, critic_metrics
from agentrl.learner.engine import PolicyEngine, kl_reference_for
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.packing import MicroBatch, build_micro_batch, check_vocabulary, plan_micro_batches, split_minibatches
from agentrl.learner.token_recorder import TokenRecorder
from agentrl.learner.update_guard import UpdateGuard
from agentrl.objective import scale_for_residuals
from agentrl.objective.losses import loss_denominator, second_moment_reach, sequence_penalty
from agentrl.objective.policy_loss import MAX_NAMES, SUM_NAMES, TrainedTokens, combine_steps, load_loss, policy_loss, summarize
from agentrl.objective.values import VALUE_WEIGHT, gae, value_loss
from agentrl.records import Batch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMicroBatch:
    """A micro-batch with its tokens' logprobs [N] under the objective's other policies, and the critic's results."""

    batch: MicroBatch
    samples: tuple[Sample, ...]  # the samples that the indices in `batch.sequence` refer to
    critic_step: int  # index of the critic's optimizer step that the micro-batch belongs to
    critic_tokens: int  # number of trained tokens in that step, over all ranks
    proximal: Tensor | None
    reference: Tensor | None  # logprobs of the KL reference model
    returns: Tensor | None = None  # [N]
    values: Tensor | None = None  # [N] before the step

    def whitened(self, mean: float, scale: float) -> PreparedMicroBatch:
        """Returns a copy whose advantages are whitened with the mean and the standard deviation over the whole batch."""
        return replace(self, batch=replace(self.batch, advantages=(self.batch.advantages - mean) / scale))

    def value_loss(self, values: Tensor) -> Tensor:
        """Returns the sum of the value loss over the micro-batch's tokens."""
        assert self.returns is not None and self.values is not None, "values are computed before they are learned"
        return value_loss(values, self.values, self.returns).sum()


Plan = list[tuple[Batch, list[PreparedMicroBatch]]]  # the micro-batches of each optimizer step


class Updater:
    """Applies batches to an engine. `guard` checks each optimizer step and records skipped steps.

    `recorder` records the tokens of each step; None disables recording.
    """

    def __init__(self, engine: PolicyEngine, *, critic: Critic | None = None) -> None:
        self.engine = engine
        config = engine.recipe.critic
        self.critic: Critic | SharedCritic | None = SharedCritic(engine) if config is not None and config.shared else critic
        self.guard = UpdateGuard(engine.recipe.learner)
        self.recorder: TokenRecorder | None = None
        self._objective = engine.recipe.objective
        self._loss = load_loss(self._objective)
        self._learner = engine.recipe.learner
        self._reference = kl_reference_for(engine) if self._objective.kl != "none" else None

    def update(self, batch: Batch) -> dict[str, float]:
        """Trains on `batch` and returns its metrics. All ranks must pass the same batch, and they receive the same
        result.

        A minibatch is skipped if its loss, its gradient or an advantage is not finite, or if the minibatch violates one of
        `learner.limits`. In that case, the weights stay the same, and `updates_left_out` counts the minibatch. If a limit demands a
        rollback, `guard.rolling_back` is True afterwards, and the weights must not be used. During the critic's warm-up, only the critic is
        trained. Metrics that are not finite are omitted. Raises `LearnerHalted` if a limit demands a halt, or if too many steps in a row
        were skipped, and `LearnerError` if a token is not in the model's vocabulary. A batch without samples changes nothing.
        """
        start = time.perf_counter()
        self.guard.begin_step()
        recipe = self.engine.recipe
        parts = [scale_for_residuals(part, recipe) for part in split_minibatches(batch, self._learner.minibatches)]
        prepared = self._prepare(parts)
        metrics = _batch_metrics(batch)
        warming_up = self.critic is not None and batch.step < self.critic.config.warmup_steps
        if self.critic is not None:
            prepared, critic_results = self._with_advantages(prepared, self.critic)
            metrics |= critic_results
            if warming_up or isinstance(self.critic, Critic):
                metrics |= self._learn_values(prepared, self.critic)
        steps: list[dict[str, float]] = []
        reach = self._mask_reach(prepared)
        for minibatch, micro_batches in () if warming_up else prepared:
            if not self.guard.rolling_back:
                steps.append(self._optimize(minibatch, micro_batches, changed=any(step["applied"] for step in steps), reach=reach))
        wall_s = time.perf_counter() - start
        applied = [step.pop("applied") for step in steps]
        metrics["lr"] = learning_rate(self._learner, self.engine.recipe.step_limit, self._schedule_step(batch.step))
        if isinstance(self._objective.entropy_coef, tuple):
            metrics["entropy_coef"] = self._objective.entropy_weight(self._progress(batch.step))
        metrics["optimizer_steps"] = sum(applied)
        metrics["updates_left_out"] = len(applied) - sum(applied)
        metrics |= combine_steps(steps, [minibatch.denominator for minibatch, _ in prepared[: len(steps)]])
        packed = [micro.batch for _, micro_batches in prepared for micro in micro_batches]
        tokens = torch.tensor([sum(part.layout.length for part in packed), sum(len(part.behaviour) for part in packed)])
        metrics["tokens_computed"], metrics["tokens_delivered"] = map(float, self.engine.ranks.sum(tokens).tolist())
        metrics["update_s"] = wall_s
        metrics["tokens_per_s"] = metrics["tokens"] / wall_s
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def score_penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns a mapping from episode id to the penalty that `objective.kl=k1_reward` subtracts from the episode's score.

        The mapping is empty for other objectives. A collective."""
        if self._objective.kl != "k1_reward":
            return {}
        assert self._reference is not None, "a KL term needs the KL reference model"
        ranks = self.engine.ranks
        total = torch.zeros(len(samples), dtype=torch.float64, device=ranks.device)
        for batch in self._micro_batches(samples):
            ranks.report_progress("computing a penalty", batch.layout.length)
            total += sequence_penalty(batch.behaviour, self._reference(batch), batch.sequence, len(samples))
        penalties: dict[str, float] = defaultdict(float)
        for sample, value in zip(samples, ranks.sum(total).tolist(), strict=True):
            penalties[sample.episode_id] += self._objective.kl_coef * value
        return dict(penalties)

    def _schedule_step(self, step: int) -> int:
        """Returns the step number that determines the learning rate and the entropy weight. Steps that a rollback has undone are not
        counted."""
        return step - self.guard.counts.undone

    def _progress(self, step: int) -> float:
        """Returns the completed share of the run: 0 in the first step, 1 in the last; always 0 if the run has no last step."""
        return self._schedule_step(step) / max(1.0, self.engine.recipe.step_limit - 1)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Returns this rank's micro-batches. Each token carries the index of its sample in `samples`."""
        ranks = self.engine.ranks
        check_vocabulary(samples, self.engine.lm.config.get_text_config().vocab_size)
        numbers = {id(sample): number for number, sample in enumerate(samples)}
        budget = self._learner.max_tokens_per_microbatch * self._learner.sequence_parallel
        planned = plan_micro_batches(samples, rank=ranks.data_parallel_rank, ranks=ranks.data_parallel_size, max_tokens=budget)
        return [build_micro_batch(rows, ranks.device, [numbers[id(row)] for row in rows], team=ranks.team) for rows in planned]

    def _prepare(self, parts: list[Batch]) -> Plan:
        """Returns the micro-batches of each optimizer step, in the order of the critic's optimizer steps within it, with the results that
        are computed before the step."""
        recomputes = self._objective.off_policy.recomputes(len(parts))
        critic_steps = 1 if self.critic is None else self.critic.config.minibatches
        return [
            (
                minibatch,
                [
                    self._before(batch, number, piece, recomputes)
                    for number, piece in enumerate(split_minibatches(minibatch, critic_steps))
                    for batch in self._micro_batches(piece.samples)
                ],
            )
            for minibatch in parts
        ]

    @torch.no_grad()
    def _before(self, batch: MicroBatch, critic_step: int, piece: Batch, recomputes: bool) -> PreparedMicroBatch:
        """Returns a micro-batch of `piece` with the logprobs of the policy and the KL reference model and the values of the critic.

        If the policy and the critic share a trunk, the trunk runs once for both."""
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
            samples=piece.samples,
            critic_step=critic_step,
            critic_tokens=piece.denominator,
            proximal=proximal,
            reference=None if in_loss is None else in_loss(batch),
            values=values,
        )

    def _with_advantages(self, prepared: Plan, critic: Critic | SharedCritic) -> tuple[Plan, dict[str, float]]:
        """Returns the micro-batches with advantages computed from the critic's values, and the critic's metrics."""
        ranks = self.engine.ranks
        updated = [(minibatch, self._estimated(micro_batches, critic)) for minibatch, micro_batches in prepared]
        micros = [micro for _, micro_batches in updated for micro in micro_batches]
        metrics = critic_metrics([(micro.returns, micro.values) for micro in micros], ranks)
        mean, scale = advantage_moments([micro.batch.advantages for micro in micros], ranks)
        if metrics:  # there was at least one token
            metrics["advantage_std"] = scale
        if self._objective.divides_by_std:
            updated = [(minibatch, [micro.whitened(mean, scale) for micro in micro_batches]) for minibatch, micro_batches in updated]
        return updated, metrics

    def _estimated(self, micro_batches: list[PreparedMicroBatch], critic: Critic | SharedCritic) -> list[PreparedMicroBatch]:
        """Returns the micro-batches of an optimizer step with their advantages and returns."""
        steps = groupby(micro_batches, key=attrgetter("critic_step"))
        return [micro for _, step in steps for micro in self._with_returns(list(step), critic)]

    @torch.no_grad()
    def _with_returns(self, micros: list[PreparedMicroBatch], critic: Critic | SharedCritic) -> list[PreparedMicroBatch]:
        """Returns the micro-batches of one critic step with their advantages and returns, computed over complete episodes, whose samples
        may be on several ranks.

        A collective."""
        samples, config = micros[0].samples, critic.config
        starts = [0, *accumulate(sum(sample.loss_mask) for sample in samples)]
        values = torch.zeros(starts[-1], dtype=torch.float64)
        indices = [index_of_tokens(micro.batch.sequence.cpu(), torch.tensor(starts)) for micro in micros]
        for micro, index in zip(micros, indices, strict=True):
            assert micro.values is not None, "the critic has computed its values"
            values[index] = micro.values.double().cpu()
        known = self.engine.ranks.sum(values).tolist()
        rows = [known[start:end] for start, end in pairwise(starts)]
        advantages, returns = gae(samples, rows, self._last_values(samples, critic), gamma=config.gamma, lam=config.lam)
        flat = torch.tensor([list(chain.from_iterable(advantages)), list(chain.from_iterable(returns))], dtype=torch.float64)
        estimated = []
        for micro, index in zip(micros, indices, strict=True):
            own = flat[:, index].to(micro.values)
            estimated.append(replace(micro, batch=replace(micro.batch, advantages=own[0]), returns=own[1]))
        return estimated

    def _last_values(self, samples: Sequence[Sample], critic: Critic | SharedCritic) -> dict[int, float]:
        """Returns a mapping from the index of each truncated sample to the value of its last state. A collective."""
        truncated = {number: sample for number, sample in enumerate(samples) if sample.last_state}
        if not truncated:
            return {}
        states = [state_sample(sample) for sample in truncated.values()]
        values = torch.zeros(len(states))
        for batch in self._micro_batches(states):
            self.engine.ranks.report_progress("computing the values of last states", batch.layout.length)
            values[batch.sequence.cpu()] = critic.values(batch).detach().float().cpu()
        return dict(zip(truncated, self.engine.ranks.sum(values).tolist(), strict=True))

    def _learn_values(self, prepared: Plan, critic: Critic | SharedCritic) -> dict[str, float]:
        """Performs `critic.epochs` times `critic.minibatches` optimizer steps of the critic for each minibatch."""
        ranks = self.engine.ranks
        losses, norms = [], []
        for minibatch, micro_batches in prepared * critic.config.epochs:
            for _, step in groupby(micro_batches, key=attrgetter("critic_step")):
                total = torch.zeros((), dtype=torch.float64, device=ranks.device)
                for micro in step:
                    ranks.report_progress("computing a micro-batch of the critic", micro.batch.layout.length)
                    assert micro.returns is not None and micro.values is not None, "values are computed before they are learned"
                    total += critic.learn(micro.batch, micro.returns, micro.values, denominator=float(micro.critic_tokens))
                ranks.report_progress("applying the critic's gradient")
                applied, norm = critic.step(self._schedule_step(minibatch.step))
                losses.append(ranks.sum(total).item())
                self.guard.record_critic_step(minibatch, {"value_loss": losses[-1], "value_grad_norm": norm}, applied=applied)
                norms.append(norm)
        finite = [norm for norm in norms if math.isfinite(norm)]
        return ({"value_loss": fmean(losses)} if losses else {}) | ({"value_grad_norm": fmean(finite)} if finite else {})

    def _mask_reach(self, prepared: Plan) -> float:
        """Returns the `reach` of the second-moment mask, over the tokens of the whole batch; infinite with other presets."""
        if self._objective.off_policy.correction.weights != "second_moment":
            return math.inf
        ratios = [micro.proximal - micro.batch.behaviour for _, micros in prepared for micro in micros if micro.proximal is not None]
        return second_moment_reach(torch.cat(ratios) if ratios else torch.empty(0), self.engine.ranks.sum)

    def _optimize(self, minibatch: Batch, micro_batches: list[PreparedMicroBatch], *, changed: bool, reach: float) -> dict[str, float]:
        """Performs one optimizer step. `changed`: whether the weights changed since the start of the batch. `reach`: see `_mask_reach`."""
        ranks = self.engine.ranks
        sums = torch.zeros(len(SUM_NAMES) + 3, dtype=torch.float64, device=ranks.device)  # plus 2 losses, 1 count
        maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=ranks.device)
        total_weight = loss_denominator(minibatch.samples, self._objective.aggregation, length=self.engine.recipe.policy.max_model_len)
        for micro in micro_batches:
            ranks.report_progress("computing a micro-batch", micro.batch.layout.length)
            if isinstance(self.critic, SharedCritic):
                logprobs, entropy, values = self.critic.score(micro.batch)
            else:
                (logprobs, entropy), values = self.engine.logprobs(micro.batch), None
            on_policy = None if changed and micro.proximal is None else micro.batch.versions == minibatch.step
            result = policy_loss(
                _tokens(micro, logprobs, entropy, on_policy),
                self._objective,
                denominator=total_weight,
                surrogate=self._loss,
                reach=reach,
                progress=self._progress(minibatch.step),
            )
            if self.recorder is not None:
                self.recorder.add(micro.samples, micro.batch.sequence, logprobs, entropy, result)
            loss = result.loss
            if values is not None:
                value = micro.value_loss(values) / minibatch.denominator
                loss = loss + VALUE_WEIGHT * value
                sums[-3] += value.detach()
            self.engine.backward(loss)
            sums[:-3] += result.sums
            sums[-2] += result.loss.detach()
            sums[-1] += (~micro.batch.advantages.isfinite()).sum()
            maxima = torch.maximum(maxima, result.maxima)
        ranks.report_progress("applying the gradient")
        total = ranks.sum(sums)
        metrics = summarize(total[:-3], ranks.max(maxima), with_reference=self._objective.kl in ("k1", "k2", "k3"))
        if isinstance(self.critic, SharedCritic):
            metrics["value_loss"] = total[-3].item()
        metrics |= {"loss": total[-2].item(), "advantages_not_finite": total[-1].item()}
        applied, metrics["grad_norm"] = self.engine.step(self._schedule_step(minibatch.step), refuse_above=self.guard.largest_norm(metrics))
        self.guard.record_policy_step(minibatch, metrics, applied=applied)
        del metrics["advantages_not_finite"]
        return metrics | {"applied": float(applied)}


def _tokens(micro: PreparedMicroBatch, logprobs: Tensor, entropy: Tensor, on_policy: Tensor | None) -> TrainedTokens:
    return TrainedTokens(
        logprobs=logprobs,
        behaviour=micro.batch.behaviour,
        advantages=micro.batch.advantages,
        sequence=micro.batch.sequence,
        proximal=micro.proximal,
        kl_reference=micro.reference,
        on_policy=on_policy,
        entropy=entropy,
        rollout_tokens=micro.batch.rollout_tokens,
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
        metrics |= {"length_max": float(max(lengths)), "staleness_mean": fmean(lags), "staleness_max": float(max(lags))}
    advantages = [sample.advantages[sample.loss_mask.index(True)] for sample in batch.samples if sample.advantages]
    if advantages:  # with a critic they are not known yet
        metrics["advantage_std"] = pstdev(advantages) if all(map(math.isfinite, advantages)) else math.nan
    return metrics


def index_of_tokens(sequence: Tensor, starts: Tensor) -> Tensor:
    """Returns the index of each token among the tokens of all samples. A sample's tokens are adjacent and start at its entry in
    `starts`."""
    _, counts = torch.unique_consecutive(sequence, return_counts=True)
    begins = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return starts[sequence] + torch.arange(len(sequence)) - begins


def state_sample(sample: Sample) -> Sample:
    """Returns a sample whose only trained token follows the last state of `sample`, so that the critic computes that state's value."""
    count = len(sample.last_state)
    return Sample(
        episode_id=sample.episode_id,
        group_index=sample.group_index,
        token_ids=(*sample.last_state, sample.last_state[-1]),
        loss_mask=(*(False,) * count, True),
        logprobs=(0.0,) * (count + 1),
        versions=(-1,) * (count + 1),
        rewards=(0.0,) * (count + 1),
    )

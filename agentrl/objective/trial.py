"""Tries a user-supplied advantage estimator or loss on a tiny step before a run starts, so that errors appear at once.

Trying a loss imports torch, which takes seconds, so built-in losses are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from agentrl.base.error_text import one_line_error, raise_location
from agentrl.base.user_code import raising_as
from agentrl.config.recipe import ObjectiveConfig
from agentrl.errors import PluginError
from agentrl.objective.advantages import check_advantages, load_estimator
from agentrl.protocols import AdvantageEstimator


def try_estimator(objective: ObjectiveConfig, *, group_size: int) -> None:
    """Calls the estimator on three groups: different scores, equal scores, and a group with an excluded attempt.

    Raises `PluginError` if the estimator cannot be loaded, raises an exception, or returns the wrong shape, a non-finite value or different
    results for the same scores.
    """
    size = max(group_size, 2)
    groups = [[float(member % 2) for member in range(size)], [1.0] * size, [member / size for member in range(size - 1)]]
    name, function = objective.advantage.ref, load_estimator(objective)
    first, second = (_advantages(function, name, groups) for _ in range(2))
    if not all(math.isfinite(value) for values in first for value in values):
        raise _estimator_error(name, groups, f"it returned {first}, which is not finite", "return 0 if all scores of a group are equal")
    if first != second:
        raise _estimator_error(name, groups, f"it returned {first}, then {second}", "make it a pure function: every rank calls it")


def _advantages(function: AdvantageEstimator, name: str, groups: Sequence[Sequence[float]]) -> list[list[float]]:
    with raising_as(
        lambda error: _estimator_error(name, groups, f"it raised {one_line_error(error)} ({raise_location(error)})", "correct it there")
    ):
        result = function([list(scores) for scores in groups])
    try:
        return check_advantages(result, groups)
    except ValueError as error:
        raise _estimator_error(name, groups, str(error), "return a list for each group, with a float for each of its scores") from error


def _estimator_error(name: str, groups: Sequence[Sequence[float]], problem: str, fix: str) -> PluginError:
    return PluginError(f"objective.advantage {name!r}, tried on the scores {[list(scores) for scores in groups]}: {problem}", fix=fix)


def try_loss(objective: ObjectiveConfig) -> None:
    """Calls the loss on five tokens of two sequences and on no tokens, and computes the gradient. Imports torch.

    Raises `PluginError` if the loss cannot be loaded, raises an exception, or returns the wrong shape or type, a non-finite term or
    gradient, or a term that does not depend on the policy.
    """
    import torch

    from agentrl.objective import losses
    from agentrl.objective.policy_loss import load_loss

    name, function = objective.loss.ref, load_loss(objective)
    for count in (5, 0):
        logprobs = torch.linspace(-2.0, -0.1, count, requires_grad=True)
        arguments = losses.LossInput.from_config(
            objective,
            log_ratio=logprobs - torch.linspace(-1.9, -0.4, count),
            logprobs=logprobs,
            advantages=torch.linspace(-1.0, 1.0, count),
            sequence=torch.tensor([0, 0, 1, 1, 1])[:count],
        )
        with raising_as(partial(_failed_loss, name, count)):
            gain, _ = losses.check_surrogate(function(arguments), arguments, name)
            if gain.requires_grad:
                gain.sum().backward()  # type: ignore[no-untyped-call]
        if not gain.isfinite().all():
            raise _loss_error(name, count, f"it returned {gain.tolist()}, which is not finite", "keep every token's term finite")
        if logprobs.grad is None or (count and not logprobs.grad.any()):
            raise _loss_error(name, count, "its term does not depend on the policy", "compute it from tokens.log_ratio or tokens.logprobs")
        if not logprobs.grad.isfinite().all():
            raise _loss_error(name, count, f"its gradient is {logprobs.grad.tolist()}", "keep every token's gradient finite")


def _failed_loss(name: str, count: int, error: BaseException) -> PluginError:
    if isinstance(error, PluginError):
        return PluginError(f"{error.message}, tried on {count} tokens", fix=error.fix)
    return _loss_error(name, count, f"it raised {one_line_error(error)} ({raise_location(error)})", "correct it there")


def _loss_error(name: str, count: int, problem: str, fix: str) -> PluginError:
    return PluginError(f"objective.loss {name!r}, tried on {count} tokens: {problem}", fix=fix)

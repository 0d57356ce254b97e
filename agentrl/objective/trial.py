"""Somebody's advantage estimator or loss, tried on a tiny step before a run starts: what would fail in an hour fails now.

Shapes, NaN and exceptions are told with what was given and what came back. A loss is tried with torch, which takes seconds to import:
nothing here is called for those that ship.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl.base.error_text import one_line_error, raise_location
from agentrl.config.recipe import ObjectiveConfig
from agentrl.errors import PluginError
from agentrl.objective.advantages import check_advantages, load_estimator
from agentrl.protocols import AdvantageEstimator


def try_estimator(objective: ObjectiveConfig, *, group_size: int) -> None:
    """Calls the estimator on three groups: different scores, equal ones, and a group of which an attempt was left out.

    Raises `PluginError` for whatever it raises, for another shape, for what is not finite, and for two answers to one question.
    """
    size = max(group_size, 2)
    groups = [[float(member % 2) for member in range(size)], [1.0] * size, [member / size for member in range(size - 1)]]
    name, function = objective.advantage, load_estimator(objective)
    first, second = (_answer(function, name, groups) for _ in range(2))
    if not all(math.isfinite(value) for values in first for value in values):
        raise _wrong(name, groups, f"it gave {first}, which is not finite", "give 0 where the scores of a group are all equal")
    if first != second:
        raise _wrong(name, groups, f"it gave {first}, then {second}", "make it a pure function: every rank of the learner calls it")


def _answer(function: AdvantageEstimator, name: str, groups: Sequence[Sequence[float]]) -> list[list[float]]:
    try:
        made = function([list(scores) for scores in groups])
    except (Exception, SystemExit) as error:
        raise _wrong(name, groups, f"it raised {one_line_error(error)} ({raise_location(error)})", "correct it there") from error
    try:
        return check_advantages(made, groups)
    except ValueError as error:
        raise _wrong(name, groups, str(error), "give a list for each group, with a float for each of its scores") from error


def _wrong(name: str, groups: Sequence[Sequence[float]], problem: str, fix: str) -> PluginError:
    return PluginError(f"objective.advantage {name!r}, tried on the scores {[list(scores) for scores in groups]}: {problem}", fix=fix)


def try_loss(objective: ObjectiveConfig) -> None:
    """Calls the loss on five tokens of two sequences, and on none, and takes the gradient. Imports torch.

    Raises `PluginError` for whatever it raises, for another shape or type, for a term or gradient that is not finite, and for a term
    that the policy cannot change.
    """
    import torch

    from agentrl.objective import losses
    from agentrl.objective.policy_loss import load_loss

    name, function = objective.loss, load_loss(objective)
    for count in (5, 0):
        logprobs = torch.linspace(-2.0, -0.1, count, requires_grad=True)
        given = losses.LossInput(
            log_ratio=logprobs - torch.linspace(-1.9, -0.4, count),
            logprobs=logprobs,
            advantages=torch.linspace(-1.0, 1.0, count),
            sequence=torch.tensor([0, 0, 1, 1, 1])[:count],
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            dual_clip=objective.dual_clip,
            cap=objective.is_cap if objective.caps_ratio else math.inf,
        )
        try:
            gain, _ = losses.check_surrogate(function(given), given, name)
            if gain.requires_grad:
                gain.sum().backward()  # type: ignore[no-untyped-call]
        except PluginError as error:
            raise PluginError(f"{error.message}, tried on {count} tokens", fix=error.fix) from error
        except (Exception, SystemExit) as error:
            raise _failed(name, count, f"it raised {one_line_error(error)} ({raise_location(error)})", "correct it there") from error
        if not gain.isfinite().all():
            raise _failed(name, count, f"it gave {gain.tolist()}, which is not finite", "keep every token's term finite")
        if logprobs.grad is None or (count and not logprobs.grad.any()):
            raise _failed(name, count, "its term does not depend on the policy", "make it of tokens.log_ratio or tokens.logprobs")
        if not logprobs.grad.isfinite().all():
            raise _failed(name, count, f"its gradient is {logprobs.grad.tolist()}", "keep every token's gradient finite")


def _failed(name: str, count: int, problem: str, fix: str) -> PluginError:
    return PluginError(f"objective.loss {name!r}, tried on {count} tokens: {problem}", fix=fix)

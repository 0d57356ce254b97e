"""Samples a turn with bounded thinking: up to the bound, then the model's end mark if the model is still thinking, then the rest.

The tokens of the end mark are part of the completion, because the model reads them, but they are not sampled. `Completion.forced` lists
these tokens, and the learner treats them as context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from agentrl.errors import TaskError
from agentrl.records import CUT, Completion, Task, VersionSpan
from agentrl.records.limits import Thinking
from agentrl.records.sampling import Supports
from agentrl.rollout.pace import OutOfTime

ANSWER = ".answer"
"""Suffix of the request id for the part of a turn after the bound."""


def thinking_bound(task: Task, thinking: Thinking | None) -> tuple[int, Thinking] | None:
    """Returns the task's bound on thinking, in tokens, and how to end thinking; None if there is no bound.

    Raises `TaskError` if the bound cannot be enforced.
    """
    most = task.limits.thinking_tokens
    if most is None:
        return None
    if thinking is None:
        raise TaskError(
            f"task {task.id!r}: limits.thinking_tokens={most} requires a chat template with <think> and </think>, and an agent that ends"
            " thinking, as the built-in agents do",
            fix="remove the limit, or use a different model or agent",
        )
    return most, thinking


class SampleTokens(Protocol):
    """Samples at most `max_tokens` tokens after `token_ids`."""

    async def __call__(self, token_ids: Sequence[int], max_tokens: int, part: str = "") -> Completion: ...


async def sample_turn(context: Sequence[int], budget: int, ask: SampleTokens, thought: tuple[int, Thinking] | None) -> Completion:
    """Returns a completion of at most `budget` tokens, including forced tokens.

    Args:
        thought: the bound on thinking and how to end thinking; None means no bound. A bound has no effect if it and the end mark
            leave no tokens of the budget.
    """
    if thought is None or thought[0] + len(thought[1].end) >= budget:
        return await ask(context, budget)
    most, thinking = thought
    first = await ask(context, most)
    if first.finish_reason != "length" or len(first.token_ids) != most:
        return first
    forced = thinking.end if thinking.unfinished(first.token_ids) else ()
    try:
        rest = await ask([*context, *first.token_ids, *forced], budget - most - len(forced), ANSWER)
    except OutOfTime:
        return replace(first, finish_reason=CUT)
    return join_completions(first, rest, forced)


def join_completions(first: Completion, rest: Completion, forced: tuple[int, ...] = ()) -> Completion:
    """Joins two parts of a turn, with the forced tokens between them.

    The forced tokens belong to the preceding version span and have a logprob of 0.
    """
    start = len(first.token_ids)
    end = start + len(forced)
    spans = list(first.versions)
    if forced:
        spans[-1] = VersionSpan(version=spans[-1].version, start=spans[-1].start, end=end)
    spans += [VersionSpan(version=version.version, start=end + version.start, end=end + version.end) for version in rest.versions]
    supports = (part.supports or len(part.token_ids) for part in (first, rest))
    return Completion(
        token_ids=(*first.token_ids, *forced, *rest.token_ids),
        logprobs=(*first.logprobs, *(0.0,) * len(forced), *rest.logprobs),
        versions=tuple(spans),
        finish_reason=rest.finish_reason,
        supports=Supports.join((next(supports), len(forced), next(supports))),
        forced=tuple(range(start, end)),
    )

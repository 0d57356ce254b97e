"""The calls of one turn: which of them run at the same time, what is left of the tools' budgets, and results in the order of the calls."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from agentrl.agent.invoke import CallResult, call_tool
from agentrl.agent.outage_blame import Caller
from agentrl.agent.toolbox import Toolbox
from agentrl.agent.tools import ToolOutcome, bounds_of, runs_together
from agentrl.errors import InfrastructureError
from agentrl.protocols import LiveEpisode
from agentrl.records import Blame, Failure, ToolCall, ToolResult
from agentrl.records.fields import json_object

SUBMIT = "submit"
"""The tool that hands in an answer."""

T = TypeVar("T")


async def run_calls(
    episode: LiveEpisode, tools: Toolbox, calls: Sequence[ToolCall], *, spent: Counter[str], also: Sequence[str] = ()
) -> tuple[tuple[ToolResult, ...], str | None]:
    """Runs calls of one turn, up to a submitted answer or a lost sandbox: what they gave, and the answer.

    Neighbours whose tools say that they may run together do; every other call runs alone, after those before it.

    Args:
        spent: calls of the episode so far, as `count_calls` gives them; these are added before any of them runs.
        also: names of tools that are no part of the toolbox, for an agent that names one that there is not.

    Raises what `call_tool` raises; of several that run together, the first in their order.
    """
    results: list[ToolResult] = []
    for batch in _batches(tools, calls):
        due = [_refused(episode, tools, call, spent, also) for call in batch]
        for call, (outcome, wall_s) in zip(batch, await _run(episode, tools, batch, due), strict=True):
            results.append(ToolResult(name=call.name[:64], output=episode.clip_output(outcome.output), ok=outcome.ok, wall_s=wall_s))
            if outcome.answer is not None or episode.sandbox_lost:
                return tuple(results), outcome.answer
    return tuple(results), None


async def run_call(episode: LiveEpisode, tools: Toolbox, call: ToolCall, made: Counter[str]) -> ToolOutcome:
    """Runs one call of an agent in its episode. A tool that there is not is answered with the names of those that there are.

    Args:
        made: what `count_calls` gave when the turn began; the call is added.
    """
    refused = _refused(episode, tools, call, made)
    return (await _run(episode, tools, [call], [refused]))[0][0]


def _batches(tools: Toolbox, calls: Sequence[ToolCall]) -> Iterator[list[ToolCall]]:
    for together, group in groupby(calls, key=lambda call: call.name in tools and runs_together(tools[call.name])):
        if together:
            yield list(group)
        else:
            yield from ([call] for call in group)


async def _run(
    episode: LiveEpisode, tools: Toolbox, calls: Sequence[ToolCall], refused: Sequence[ToolOutcome | None]
) -> list[tuple[ToolOutcome, float]]:
    """What each call came to, and its seconds; those that are refused are not made."""
    made = [call for call, no in zip(calls, refused, strict=True) if no is None]
    sandbox = await episode.sandbox() if any(tools[call.name].needs_sandbox for call in made) else None

    async def one(call: ToolCall) -> tuple[CallResult, float]:
        tool, started = tools[call.name], time.monotonic()
        arguments = json_object(call.arguments)  # the tool's own copy: what is recorded is what the agent wrote
        given = sandbox if tool.needs_sandbox else None
        limits, turn = episode.task.limits, episode.turn_count
        try:
            called = await call_tool(
                tool,
                arguments,
                given,
                limits,
                turn=turn,
                caller=Caller(attempt=episode.id, task=episode.task.id),
                record=None if episode.tools is None else episode.tools.record,
                on_lost=lambda: _lose(episode),
            )
        except InfrastructureError:
            if given is None or not episode.sandbox_lost:
                raise
            told = ToolOutcome(output="error: the sandbox is gone: another agent's call to it was cut short", ok=False)
            called = CallResult(outcome=told, sandbox_lost=True)  # that call is on record as the policy's fault
        return called, time.monotonic() - started

    if not made:
        return [(no, 0.0) for no in refused if no is not None]
    with episode.running(sandbox):
        done = iter([await one(made[0])] if len(made) == 1 else await _together([one(call) for call in made]))
    outcomes: list[tuple[ToolOutcome, float]] = []
    for no in refused:
        if no is not None:
            outcomes.append((no, 0.0))
            continue
        called, wall_s = next(done)
        if called.failure is not None:
            episode.add_failure(called.failure)
        episode.sandbox_lost = episode.sandbox_lost or called.sandbox_lost
        outcomes.append((called.outcome, wall_s))
    return outcomes


def _lose(episode: LiveEpisode) -> None:
    episode.sandbox_lost = True


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in the order of the calls, once all have ended. Raises what the first of them raised."""
    running = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(running)
    except BaseException:  # a cancellation: each of them ends within its grace
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        raise
    failed = [task for task in running if task.cancelled() or task.exception() is not None]
    return [task.result() for task in failed or running]


def count_calls(episode: LiveEpisode) -> Counter[str]:
    """Calls so far, by the tool's name, those that were refused included; of agents that act at the same time, up to their last turn."""
    turns = (turn for trajectory in episode.trajectories for turn in trajectory.turns)
    return Counter(result.name for turn in turns for result in turn.tool_results)


def budget_error(episode: LiveEpisode, spent: Counter[str], name: str) -> ToolOutcome | None:
    """What a call beyond `Limits.tool_calls` is answered, the policy's failure; None within. `spent` counts it already.

    Every call counts that the policy has written, of whatever tool, but not handing in an answer, which is always possible.
    """
    most = episode.task.limits.tool_calls
    if most is None or name == SUBMIT or spent.total() - spent[SUBMIT] <= most:
        return None
    told = f"this episode may make {most} tool calls, and has made them: answer with what you know"
    episode.add_failure(Failure(stage="tool", blame=Blame.POLICY, kind="tool_calls", message=told, turn=episode.turn_count))
    return ToolOutcome(output=f"error: {told}", ok=False)


def _refused(episode: LiveEpisode, tools: Toolbox, call: ToolCall, spent: Counter[str], also: Sequence[str] = ()) -> ToolOutcome | None:
    """What a call is answered that is not made; None for one that is. It is counted either way."""
    tool = tools.get(call.name)
    spent[call.name[:64]] += 1
    if tool is None:
        return ToolOutcome(output=f"error: no tool {call.name[:64]!r}; tools: {', '.join([*tools, *also])}", ok=False)
    if used_up := budget_error(episode, spent, call.name):
        return used_up
    most = bounds_of(tool).calls
    if most is None or spent[call.name[:64]] <= most:
        return None
    told = f"error: {tool.name} may be called {most} times in an episode, and has been: go on without it"
    return ToolOutcome(output=told, ok=False)

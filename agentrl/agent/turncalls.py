"""Runs the calls of one turn: which run concurrently, the tools' budgets, and results in the order of the calls."""

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
from agentrl.protocols import LiveEpisode, Sandbox
from agentrl.records import Blame, Failure, ToolCall, ToolResult
from agentrl.records.fields import json_object

SUBMIT = "submit"
"""The tool that hands in an answer."""

T = TypeVar("T")


async def run_calls(
    episode: LiveEpisode, tools: Toolbox, calls: Sequence[ToolCall], *, spent: Counter[str], also: Sequence[str] = ()
) -> tuple[tuple[ToolResult, ...], str | None]:
    """Runs calls of one turn, up to a submitted answer or a lost sandbox. Returns the results and the answer.

    Consecutive calls of tools that allow it run concurrently; every other call runs alone, in order. Raises what `call_tool` raises; of
    several concurrent calls, the error of the first.

    Args:
        spent: the episode's calls so far (`count_calls`). These calls are added before any of them runs.
        also: names of tools outside the toolbox, for the error about an unknown tool.
    """
    results: list[ToolResult] = []
    for batch in _batches(tools, calls):
        refused = [_refused(episode, tools, call, spent, also) for call in batch]
        for call, (outcome, wall_s) in zip(batch, await _run(episode, tools, batch, refused), strict=True):
            results.append(ToolResult(name=call.name[:64], output=episode.clip_output(outcome.output), ok=outcome.ok, wall_s=wall_s))
            if outcome.answer is not None or episode.sandbox_lost:
                return tuple(results), outcome.answer
    return tuple(results), None


async def run_call(episode: LiveEpisode, tools: Toolbox, call: ToolCall, spent: Counter[str]) -> ToolOutcome:
    """Runs one call and adds it to `spent`, the episode's calls so far (`count_calls`)."""
    return (await _run(episode, tools, [call], [_refused(episode, tools, call, spent)]))[0][0]


def _batches(tools: Toolbox, calls: Sequence[ToolCall]) -> Iterator[list[ToolCall]]:
    for together, group in groupby(calls, key=lambda call: call.name in tools and runs_together(tools[call.name])):
        if together:
            yield list(group)
        else:
            yield from ([call] for call in group)


async def _run(
    episode: LiveEpisode, tools: Toolbox, calls: Sequence[ToolCall], refused: Sequence[ToolOutcome | None]
) -> list[tuple[ToolOutcome, float]]:
    """Runs the calls that are not rejected, concurrently. Returns the outcome and the seconds of each call."""
    allowed = [call for call, refusal in zip(calls, refused, strict=True) if refusal is None]
    sandbox = await episode.sandbox() if any(tools[call.name].needs_sandbox for call in allowed) else None
    done: Iterator[tuple[CallResult, float]] = iter(())
    if allowed:
        with episode.running(sandbox):
            jobs = [_call(episode, tools, call, sandbox) for call in allowed]
            done = iter([await jobs[0]] if len(jobs) == 1 else await _together(jobs))
    outcomes: list[tuple[ToolOutcome, float]] = []
    for refusal in refused:
        if refusal is not None:
            outcomes.append((refusal, 0.0))
            continue
        called, wall_s = next(done)
        if called.failure is not None:
            episode.add_failure(called.failure)
        episode.sandbox_lost = episode.sandbox_lost or called.sandbox_lost
        outcomes.append((called.outcome, wall_s))
    return outcomes


async def _call(episode: LiveEpisode, tools: Toolbox, call: ToolCall, sandbox: Sandbox | None) -> tuple[CallResult, float]:
    """Runs one call. Returns its result and its seconds."""
    tool, started = tools[call.name], time.monotonic()

    def lose() -> None:
        episode.sandbox_lost = True

    try:
        called = await call_tool(
            tool,
            json_object(call.arguments),  # a copy: the record must show what the agent wrote
            sandbox if tool.needs_sandbox else None,
            episode.task.limits,
            turn=episode.turn_count,
            caller=Caller(attempt=episode.id, task=episode.task.id),
            record=None if episode.tools is None else episode.tools.record,
            on_lost=lose,
        )
    except InfrastructureError:
        if not tool.needs_sandbox or not episode.sandbox_lost:
            raise
        outcome = ToolOutcome(output="error: the sandbox is gone: another agent's call to it was cut short", ok=False)
        called = CallResult(outcome=outcome, sandbox_lost=True)  # that call is recorded as the policy's fault
    return called, time.monotonic() - started


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in the order of the calls, once all have ended. Raises the error of the first call that has one."""
    running = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(running)
    except BaseException:  # a cancellation: each call ends within its grace period
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        raise
    failed = [task for task in running if task.cancelled() or task.exception() is not None]
    return [task.result() for task in failed or running]


def count_calls(episode: LiveEpisode) -> Counter[str]:
    """Returns the number of calls so far by the tool's name, including rejected calls."""
    turns = (turn for trajectory in episode.trajectories for turn in trajectory.turns)
    return Counter(result.name for turn in turns for result in turn.tool_results)


def budget_error(episode: LiveEpisode, spent: Counter[str], name: str) -> ToolOutcome | None:
    """Returns the error for a call beyond `Limits.tool_calls`, and records the policy's failure; None within the limit.

    `spent` counts the call already. Every call of any tool counts, except handing in an answer.
    """
    most = episode.task.limits.tool_calls
    if most is None or name == SUBMIT or spent.total() - spent[SUBMIT] <= most:
        return None
    message = f"this episode may make {most} tool calls, and has made them: answer with what you know"
    episode.add_failure(Failure(stage="tool", blame=Blame.POLICY, kind="tool_calls", message=message, turn=episode.turn_count))
    return ToolOutcome(output=f"error: {message}", ok=False)


def _refused(episode: LiveEpisode, tools: Toolbox, call: ToolCall, spent: Counter[str], also: Sequence[str] = ()) -> ToolOutcome | None:
    """Counts a call. Returns the error if it must not run, else None."""
    tool = tools.get(call.name)
    spent[call.name[:64]] += 1
    if tool is None:
        return ToolOutcome(output=f"error: no tool {call.name[:64]!r}; tools: {', '.join([*tools, *also])}", ok=False)
    if over := budget_error(episode, spent, call.name):
        return over
    most = bounds_of(tool).calls
    if most is None or spent[call.name[:64]] <= most:
        return None
    message = f"error: {tool.name} may be called {most} times in an episode, and was: continue without it"
    return ToolOutcome(output=message, ok=False)

"""Scores tool use: which tools an episode must and must not call, how often, and in which order.

    careful = ToolUse(must=("search",), never=("shell",), at_most={"python": 3}, order=("search", "submit"))      in rewards/mine.py

Calls do not show whether the answer is correct, so use this verifier as a part or a required criterion of a rubric
(`agentrl.reward.rubric`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator

from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import ConfiguredVerifier


class ToolUse(ConfiguredVerifier):
    """Scores 1 if every rule holds, else 0. Each rule is a part of the score, and the part `rules` is the share of rules that hold.
    Settings are in `task.data["tool_use"]`.

    All calls in all trajectories count, but with `succeeded`, `must` and `order` count only calls whose result is ok. An episode without
    turns, such as the episode of a gold solution in `agentrl check`, has no score.
    """

    name: ClassVar[str] = "tool_use"

    must: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    at_most: dict[str, int] = Field(default_factory=dict)
    calls: int | None = Field(None, ge=0)
    """Maximum total number of calls to all tools. None means no limit."""
    order: tuple[str, ...] = ()
    """All of these tools must be called, and their first calls must be in this order."""
    succeeded: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if both := set(self.never) & {*self.must, *self.order}:
            raise ValueError(f"{sorted(both)[0]} is both required and forbidden")
        if any(most < 0 for most in self.at_most.values()) or len(set(self.order)) < len(self.order):
            raise ValueError("at_most must contain numbers of at least 0, and order must list each tool once")
        return self

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the tool calls."""
        rules = self.for_task(task)
        if not any(trajectory.turns for trajectory in episode.trajectories):
            return Score(value=None, reason="the episode has no turns, so its tool calls are unknown")
        all_calls = list(_calls(episode, succeeded=False))
        counted = list(_calls(episode, succeeded=True)) if rules.succeeded else all_calls
        times = Counter(all_calls)
        rules_hold = {f"must {name}": name in counted for name in rules.must}
        rules_hold |= {f"never {name}": name not in times for name in rules.never}
        rules_hold |= {f"at most {most} {name}": times[name] <= most for name, most in rules.at_most.items()}
        if rules.calls is not None:
            rules_hold[f"at most {rules.calls} calls"] = len(all_calls) <= rules.calls
        if rules.order:
            rules_hold["order"] = _in_order(rules.order, counted)
        parts = {name: float(holds) for name, holds in rules_hold.items()}
        broken = [name for name, holds in rules_hold.items() if not holds]
        share = sum(parts.values()) / len(parts) if parts else 1.0
        return Score(
            value=float(not broken), parts=parts | {"rules": share}, evidence=f"broken rules: {'; '.join(broken)}"[:500] if broken else ""
        )


def _calls(episode: Episode, *, succeeded: bool) -> Iterator[str]:
    """Yields the names of the called tools, in order. With `succeeded`, yields only calls whose result is ok.

    A sub-agent's calls come after the call that started the sub-agent. The calls in a new context come after the turn at which it started.
    """
    children: dict[tuple[int, int, int | None], list[int]] = {}
    for index, trajectory in enumerate(episode.trajectories):
        if (parent := trajectory.parent) is not None:
            children.setdefault((parent.trajectory, parent.turn, parent.call), []).append(index)
    pending: list[int | str] = [index for index, candidate in reversed(list(enumerate(episode.trajectories))) if candidate.parent is None]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
            continue
        items: list[int | str] = []
        for number, turn in enumerate(episode.trajectories[item].turns):
            for place in range(max(len(turn.message.tool_calls), len(turn.tool_results))):
                if succeeded:
                    items += [result.name for result in turn.tool_results[place : place + 1] if result.ok]
                else:
                    items += [call.name for call in turn.message.tool_calls[place : place + 1]]
                items += children.get((item, number, place), [])
            items += children.get((item, number, None), [])
        pending += reversed(items)


def _in_order(names: Sequence[str], calls: Sequence[str]) -> bool:
    if not set(names) <= set(calls):
        return False
    first = [calls.index(name) for name in names]
    return first == sorted(first)


tool_use = ToolUse()

"""Rules on tool use: which tools an episode must and must not call, how often, and in which order.

    careful = ToolUse(must=("search",), never=("shell",), at_most={"python": 3}, order=("search", "submit"))      in rewards/mine.py

Calls say nothing of whether the answer is right: this is a part of a rubric, or its gate (`agentrl.reward.rubric`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator

from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import ConfiguredVerifier


class ToolUse(ConfiguredVerifier):
    """1 when every rule holds, else 0; each rule is a part, and `rules` the share that holds. Settings in `task.data["tool_use"]`.

    A call counts when it was made, in any trajectory of the episode, whatever it gave; with `succeeded`, `must` and `order` count those
    alone whose result was ok. An episode without any turn, as that of a gold solution in `agentrl check`, has no score.
    """

    name: ClassVar[str] = "tool_use"

    must: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    at_most: dict[str, int] = Field(default_factory=dict)
    calls: int | None = Field(None, ge=0)
    """Calls of all tools together, at most. None: any number."""
    order: tuple[str, ...] = ()
    """The first calls of these tools come in this order, and each is called."""
    succeeded: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if both := set(self.never) & {*self.must, *self.order}:
            raise ValueError(f"{sorted(both)[0]} must and must not be called")
        if any(most < 0 for most in self.at_most.values()) or len(set(self.order)) < len(self.order):
            raise ValueError("at_most takes numbers from 0, and order names each tool once")
        return self

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.for_task(task)
        if not any(trajectory.turns for trajectory in episode.trajectories):
            return Score(value=None, reason="the episode has no turns, so nothing is known of its tool calls")
        made = list(_calls(episode, succeeded=False))
        counted = list(_calls(episode, succeeded=True)) if rules.succeeded else made
        times = Counter(made)
        held = {f"must {name}": name in counted for name in rules.must}
        held |= {f"never {name}": name not in times for name in rules.never}
        held |= {f"at most {most} {name}": times[name] <= most for name, most in rules.at_most.items()}
        if rules.calls is not None:
            held[f"at most {rules.calls} calls"] = len(made) <= rules.calls
        if rules.order:
            held["order"] = _in_order(rules.order, counted)
        parts = {name: float(holds) for name, holds in held.items()}
        broken = [name for name, holds in held.items() if not holds]
        share = sum(parts.values()) / len(parts) if parts else 1.0
        return Score(
            value=float(not broken), parts=parts | {"rules": share}, evidence=f"broken: {'; '.join(broken)}"[:500] if broken else ""
        )


def _calls(episode: Episode, *, succeeded: bool) -> Iterator[str]:
    """Names of the called tools, in order. With `succeeded`, only calls whose result is ok.

    A sub-agent's calls come after the call that started it, and those of a restarted context after the turn that it comes from.
    """
    children: dict[tuple[int, int, int | None], list[int]] = {}
    for index, trajectory in enumerate(episode.trajectories):
        if (parent := trajectory.parent) is not None:
            children.setdefault((parent.trajectory, parent.turn, parent.call), []).append(index)
    pending: list[int | str] = [index for index, one in reversed(list(enumerate(episode.trajectories))) if one.parent is None]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
            continue
        found: list[int | str] = []
        for number, turn in enumerate(episode.trajectories[item].turns):
            for place in range(max(len(turn.message.tool_calls), len(turn.tool_results))):
                if succeeded:
                    found += [result.name for result in turn.tool_results[place : place + 1] if result.ok]
                else:
                    found += [call.name for call in turn.message.tool_calls[place : place + 1]]
                found += children.get((item, number, place), [])
            found += children.get((item, number, None), [])
        pending += reversed(found)


def _in_order(names: Sequence[str], made: Sequence[str]) -> bool:
    if not set(names) <= set(made):
        return False
    first = [made.index(name) for name in names]
    return first == sorted(first)


tool_use = ToolUse()

"""Scores the answer of a task of `pages`, and each of the sub-agents that it was split over."""

from __future__ import annotations

import re

from agentrl.records import Episode, Score, Task, Trajectory


async def found(task: Task, episode: Episode) -> Score:
    """1.0 when the submitted number is the right one, else 0.0.

    A sub-agent that was given one page is worth 1.0 when it answers the number that is there, or, where it is not, anything that is no
    number; else 0.0. Without the sub-agents that answered the right number, the value would be 0.0 when no other one did.
    """
    truth = str(task.data["answer"])
    value = float(episode.answer is not None and episode.answer.strip() == truth)
    right = [at for at, line in enumerate(episode.trajectories) if _answer(line) == truth]
    return Score(
        value=value,
        evidence=f"answer {(episode.answer or '')[:80]!r}, truth {truth!r}",
        branches=tuple(_worth(line, truth, int(task.data["page"])) for line in episode.trajectories),
        without=tuple(None if _page(line) is None else value if right != [at] else 0.0 for at, line in enumerate(episode.trajectories)),
    )


def _worth(line: Trajectory, truth: str, page: int) -> float | None:
    given, answer = _page(line), _answer(line)
    if given is None:
        return None
    return float(answer == truth) if given == page else float(answer is not None and not answer.isdigit())


def _page(line: Trajectory) -> int | None:
    """The page that a sub-agent was told to read; None for others, and where it was told of none or of several."""
    told = line.prompt[-1].content if line.prompt and line.parent is not None and line.parent.call is not None else ""
    pages = {int(number) for number in re.findall(r"\bpages? (\d{1,6})\b", told)}
    return pages.pop() if len(pages) == 1 and " to " not in told else None


def _answer(line: Trajectory) -> str | None:
    """What a sub-agent handed in."""
    if line.parent is None or line.parent.call is None or not line.turns:
        return None
    message = line.turns[-1].message
    if line.stop_reason == "submitted":
        return next((str(call.arguments.get("answer", "")).strip() for call in message.tool_calls if call.name == "submit"), None)
    return message.content.strip() if line.stop_reason == "answered" else None

"""Scores the answer of a task of `pages` or `questions`, and each of the sub-agents that it was split over."""

from __future__ import annotations

import re

from agentrl.base.numbers import parse_number
from agentrl.records import Episode, Score, Task, Trajectory
from rewards.tables import says

LONGEST = 4000  # characters of an answer that are looked at; every true answer is far shorter


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


async def answered(task: Task, episode: Episode) -> Score:
    """1.0 when there is a line for each page and every one is right, else 0.0. Numbers are compared as in `rewards.tables`.

    A sub-agent that was given one page is worth 1.0 when it answers that page's question rightly, else 0.0. Without a right one the value
    would be 0.0 when no other one answered its page rightly. Parts: `split`, the share of the pages that were given to a helper of their
    own, and `helpers`, the share of these helpers that were right.
    """
    lines = _lines(episode.answer)
    right = len(lines) == len(task.data["answers"]) and all(_right(task, page, line) for page, line in enumerate(lines, 1))
    value = float(right)
    pages = [_page(line) for line in episode.trajectories]
    worth = [
        None if page is None else float(_right(task, page, _answer(line) or ""))
        for page, line in zip(pages, episode.trajectories, strict=True)
    ]
    good = [page for page, one in zip(pages, worth, strict=True) if one == 1.0]
    judged = [one for one in worth if one is not None]
    split = len({page for page in pages if page is not None and 1 <= page <= len(task.data["answers"])}) / len(task.data["answers"])
    return Score(
        value=value,
        parts={"split": split} | ({"helpers": sum(judged) / len(judged)} if judged else {}),
        evidence=f"answer {(episode.answer or '')[:80]!r}, truth {task.data['answer'][:80]!r}",
        branches=tuple(worth),
        without=tuple(
            None if one is None else 0.0 if one == 1.0 and good.count(page) == 1 else value for page, one in zip(pages, worth, strict=True)
        ),
    )


def _lines(answer: str | None) -> list[str]:
    return [] if answer is None or len(answer) > LONGEST else answer.strip().split("\n")


def _right(task: Task, page: int, answer: str) -> bool:
    """Whether an answer to the question on a page is right; there may be no such page."""
    answers, tolerances = task.data["answers"], task.data["tolerances"]
    known = 1 <= page <= len(answers) and len(answer) <= LONGEST
    return known and says(answer, str(answers[page - 1]), float(tolerances[page - 1]))


def _worth(line: Trajectory, truth: str, page: int) -> float | None:
    given, answer = _page(line), _answer(line)
    if given is None:
        return None
    return float(answer == truth) if given == page else float(answer is not None and parse_number(answer.replace(",", "")) is None)


def _page(line: Trajectory) -> int | None:
    """The page that a sub-agent was told to read; None for others, and where it was told of none or of several."""
    return page_asked(line.prompt[-1].content) if line.prompt and line.parent is not None and line.parent.call is not None else None


def page_asked(told: str) -> int | None:
    """The one page that a request speaks of, in whatever words; None for none or several."""
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

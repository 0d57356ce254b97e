"""Scores the answer to a task from `pages` or `questions`, and the answers of the sub-agents."""

from __future__ import annotations

import re

from agentrl.base.numbers import parse_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task, Trajectory
from rewards.tables import says, valid_tolerance

LONGEST = 4000  # maximum length of an answer in characters; true answers are far shorter


async def correct_number(task: Task, episode: Episode) -> Score:
    """Scores 1.0 if the submitted number is correct, else 0.0.

    A sub-agent with one page scores 1.0 if it answers with the number on the page. If the number is on a different page, it scores 1.0 for
    any answer that is not a number. In all other cases, the sub-agent scores 0.0. Other agents have no score of their own. `without` is 0.0
    for a sub-agent if it is the only one that answered with the correct number, and otherwise the episode's value.
    """
    truth = str(task.data["answer"])
    value = float(episode.answer is not None and episode.answer.strip() == truth)
    right = [at for at, line in enumerate(episode.trajectories) if _answer(line) == truth]
    return Score(
        value=value,
        evidence=f"answer {(episode.answer or '')[:80]!r}, truth {truth!r}",
        branches=tuple(_worth(trajectory, truth, int(task.data["page"])) for trajectory in episode.trajectories),
        without=tuple(None if _page(line) is None else value if right != [at] else 0.0 for at, line in enumerate(episode.trajectories)),
    )


async def answered(task: Task, episode: Episode) -> Score:
    """Scores 1.0 if the answer has one line per page and every line is correct, else 0.0. Compares numbers as `rewards.tables` does.

    A sub-agent with one page scores 1.0 if it answers that page's question correctly, else 0.0. `without` is 0.0 for a sub-agent if it is
    the only one that answered its page correctly, and otherwise the episode's value. The part `split` is the share of pages with a
    sub-agent. The part `helpers` is the share of these sub-agents that answered correctly, and is missing if there are none.

    Raises `TaskError` if the answers or the tolerances are invalid.
    """
    answers, tolerances = task.data["answers"], task.data["tolerances"]
    if not isinstance(answers, list | tuple) or not isinstance(tolerances, list | tuple) or not 0 < len(answers) == len(tolerances):
        raise TaskError(f"task {task.id}: data.answers and data.tolerances must be lists with one entry per page")
    for tolerance in tolerances:
        valid_tolerance(task, tolerance)
    lines = _lines(episode.answer)
    right = len(lines) == len(answers) and all(_right(task, page, line) for page, line in enumerate(lines, 1))
    value = float(right)
    pages = [_page(trajectory) for trajectory in episode.trajectories]
    worth = [
        None if page is None else float(_right(task, page, _answer(line) or ""))
        for page, line in zip(pages, episode.trajectories, strict=True)
    ]
    good = [page for page, score in zip(pages, worth, strict=True) if score == 1.0]
    judged = [score for score in worth if score is not None]
    split = len({page for page in pages if page is not None and 1 <= page <= len(answers)}) / len(answers)
    return Score(
        value=value,
        parts={"split": split} | ({"helpers": sum(judged) / len(judged)} if judged else {}),
        evidence=f"answer {(episode.answer or '')[:80]!r}, truth {task.data['answer'][:80]!r}",
        branches=tuple(worth),
        without=tuple(
            None if score is None else 0.0 if score == 1.0 and good.count(page) == 1 else value
            for page, score in zip(pages, worth, strict=True)
        ),
    )


def _lines(answer: str | None) -> list[str]:
    return [] if answer is None or len(answer) > LONGEST else answer.strip().split("\n")


def _right(task: Task, page: int, answer: str) -> bool:
    """Whether an answer to the question on a page is correct. False if the page does not exist."""
    answers, tolerances = task.data["answers"], task.data["tolerances"]
    known = 1 <= page <= len(answers) and len(answer) <= LONGEST
    return known and says(answer, str(answers[page - 1]), float(tolerances[page - 1]))


def _worth(line: Trajectory, truth: str, page: int) -> float | None:
    asked_page, answer = _page(line), _answer(line)
    if asked_page is None:
        return None
    return float(answer == truth) if asked_page == page else float(answer is not None and parse_number(answer.replace(",", "")) is None)


def _page(line: Trajectory) -> int | None:
    """Returns the page that a sub-agent must read; None for other agents, or if the request does not mention exactly one page."""
    return page_asked(line.prompt[-1].content) if line.prompt and line.parent is not None and line.parent.call is not None else None


def page_asked(request: str) -> int | None:
    """Returns the page that a request mentions; None if it mentions no page or several pages."""
    pages = {int(number) for number in re.findall(r"\bpages? (\d{1,6})\b", request)}
    return pages.pop() if len(pages) == 1 and " to " not in request else None


def _answer(line: Trajectory) -> str | None:
    """Returns the answer of a sub-agent; None if there is none."""
    if line.parent is None or line.parent.call is None or not line.turns:
        return None
    message = line.turns[-1].message
    if line.stop_reason == "submitted":
        return next((str(call.arguments.get("answer", "")).strip() for call in message.tool_calls if call.name == "submit"), None)
    return message.content.strip() if line.stop_reason == "answered" else None

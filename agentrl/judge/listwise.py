"""A judge that ranks the answers of a group."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError
from agentrl.judge import verdict
from agentrl.judge.model import ModelJudge
from agentrl.judge.query import ChatQuery, JudgeAnswer, digest
from agentrl.judge.rendering import answer_text, question_text
from agentrl.judge.untrusted import truncate_middle
from agentrl.protocols.reward import GroupJudge as GroupJudge
from agentrl.records import Episode, Score, Task

MOST = 16  # maximum number of distinct answers that are ranked together
_MAX_ANSWERS = 40_000  # maximum total length of all answers, in characters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listwise(ModelJudge):
    """A `GroupJudge` that ranks the answers of a group several times, in shuffled orders.

    The value of an answer is its mean rank, scaled from 0 (last) to 1 (first). Answers with the same text share a rank. Answers without
    content have the value 0. If all answers have the same text, their value is 0.5. The part `disagreement` of every score is 1 - W, where
    W is Kendall's coefficient of concordance of the rankings. A disagreement of 0 means that all rankings agree. The group is unscored if
    the disagreement exceeds `max_disagreement`, a ranking is missing, or there are more than `MOST` different answers. The values are
    comparable only within a group.
    """

    orders: int = 2
    max_disagreement: float = 0.5
    criteria: str = "Rank by how right an answer is and how well it does what the question asks; length and tone do not count."

    def __post_init__(self) -> None:
        ModelJudge.__post_init__(self)
        if not 2 <= self.orders <= 16 or not 0 <= self.max_disagreement <= 1:
            raise UserError(
                "Listwise: orders must be from 2 to 16, and max_disagreement from 0 to 1", fix="use orders=2, max_disagreement=0.5"
            )

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        """Returns one score for each episode, in the order of the episodes."""
        problem = question_text(task)
        reasons = [self._non_answer(task, episode) for episode in episodes]
        texts = list(dict.fromkeys(answer_text(episode) for episode, reason in zip(episodes, reasons, strict=True) if not reason))
        if len(texts) > MOST:
            return self._all_unscored(episodes, JudgeAnswer(reason=f"there are {len(texts)} different answers, but the maximum is {MOST}"))
        if len(texts) < 2 and not any(reasons):  # all answers are equal, so there is no advantage
            equal = Score(value=0.5, parts={"disagreement": 0.0}, evidence=f"{self.name}: the answers are all the same")
            return (equal,) * len(episodes)
        rankings, answer = await self._rank(problem, texts)
        if rankings is None:
            return self._all_unscored(episodes, answer)
        disagreement = rank_disagreement(rankings)
        if disagreement > self.max_disagreement:
            reason = f"its rankings disagree by {disagreement:.2f}, but the maximum is {self.max_disagreement:g}"
            return self._all_unscored(episodes, JudgeAnswer(reason=reason))
        values = {text: _mean_rank(index, rankings, len(texts)) for index, text in enumerate(texts)}
        return tuple(
            Score(
                value=0.0 if reason else values[answer_text(episode)],
                parts={"disagreement": disagreement},
                evidence=f"{self.name}: {reason or answer.text}",
            )
            for episode, reason in zip(episodes, reasons, strict=True)
        )

    def _all_unscored(self, episodes: Sequence[Episode], answer: JudgeAnswer) -> tuple[Score, ...]:
        return (self._unscored(answer),) * len(episodes)

    async def _rank(self, problem: str, texts: Sequence[str]) -> tuple[list[list[int]] | None, JudgeAnswer]:
        """Returns a pair: the rank of each answer in each ranking (0 is best), and the reasoning of the first query.

        If a ranking is missing, returns None and the result of the query that failed.
        """
        count = len(texts)
        if count < 2:
            return [[0] * count] * self.orders, JudgeAnswer()
        client = self._client()
        shuffles = _shuffles(count, self.orders, seed=digest([problem, list(texts)]))

        def read(fields: dict[str, Any]) -> tuple[tuple[int, ...], str]:
            return verdict.ranking(fields, count), verdict.reasoning(fields)

        queries = [self._query(problem, [texts[index] for index in order]) for order in shuffles]
        answers = await asyncio.gather(*(client.ask(query, read, draw=number) for number, query in enumerate(queries)))
        if (failed := next((answer for answer in answers if answer.verdict is None), None)) is not None:
            return None, failed
        rankings = []
        for order, answer in zip(shuffles, answers, strict=True):
            best_first = [order[shown - 1] for shown in answer.verdict[0]]
            rankings.append([best_first.index(index) for index in range(count)])
        return rankings, JudgeAnswer(text=answers[0].verdict[1])

    def _query(self, problem: str, texts: Sequence[str]) -> ChatQuery:
        answers = {f"answer {number}": truncate_middle(text, _MAX_ANSWERS // len(texts)) for number, text in enumerate(texts, 1)}
        data = {"question": problem, **answers}
        ranking = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": len(texts)}}
        return ChatQuery(instructions=self._instructions(), data=data, schema=verdict.schema({"ranking": ranking}))

    def _instructions(self) -> str:
        return (
            "You rank answers to one question. In ranking, give the numbers of all answers, each once, the best first. "
            f"{self.criteria} The order in which they are shown means nothing. Keep the reasoning short."
        )

    def _asks(self) -> dict[str, Any]:
        return {"instructions": self._instructions(), "orders": self.orders, "max_disagreement": self.max_disagreement}


def rank_disagreement(rankings: Sequence[Sequence[int]]) -> float:
    """Returns 1 - W, where W is Kendall's coefficient of concordance (Kendall and Babington Smith 1939).

    The result is 0 if all rankings are equal.

    Args:
        rankings: [rankings][answers] the rank of each answer in each ranking, without ties. For fewer than two answers, the result is 0.
    """
    count, orders = len(rankings[0]), len(rankings)
    if count < 2:
        return 0.0
    sums = [sum(column) for column in zip(*rankings, strict=True)]
    mean = sum(sums) / count
    spread: float = sum((total - mean) ** 2 for total in sums)
    return max(0.0, 1.0 - 12.0 * spread / (orders**2 * (count**3 - count)))


def _shuffles(count: int, orders: int, *, seed: str) -> list[list[int]]:
    """Returns the orders in which the answers are shown.

    Each random order is followed by its reverse, so that position bias cancels out.
    """
    rng = random.Random(seed)
    shuffles: list[list[int]] = []
    for number in range(orders):
        shuffles.append(shuffles[-1][::-1] if number % 2 else rng.sample(range(count), count))
    return shuffles


def _mean_rank(index: int, rankings: Sequence[Sequence[int]], count: int) -> float:
    """Returns the scaled mean rank of an answer: 0 if it is always ranked last, 1 if it is always ranked first."""
    return 1.0 - sum(ranks[index] for ranks in rankings) / (len(rankings) * (count - 1)) if count > 1 else 1.0

"""A judge that ranks the answers of a group among one another."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError
from agentrl.judge import verdict
from agentrl.judge.model import ModelJudge, unscored
from agentrl.judge.non_answers import non_answer_reason
from agentrl.judge.query import ChatQuery, JudgeAnswer, digest
from agentrl.judge.rendering import answer_text, question_text, reference_text, user_text
from agentrl.judge.untrusted import truncate_middle
from agentrl.protocols.group_judge import GroupJudge as GroupJudge
from agentrl.records import Episode, Score, Task

MOST = 16
"""Most different answers that are ranked at once."""
_MAX_ANSWERS = 40_000  # characters of all answers together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listwise(ModelJudge):
    """A `GroupJudge`: ranks the answers of a group, several times in shuffled orders.

    The value of an answer is its mean place, from 0 (last) to 1 (first); answers with the same text are ranked as one, and where there is
    no other, each has 0.5. Every part
    `rank_disagreement` is 1 - W of the group, where W is Kendall's coefficient of concordance of the orders (0: all agree); above
    `max_disagreement` the whole group is unscored. Values compare answers of one group and mean nothing beyond it.
    """

    orders: int = 2
    max_disagreement: float = 0.5
    criteria: str = "Rank by how right an answer is and how well it does what the question asks; length and tone do not count."

    def __post_init__(self) -> None:
        ModelJudge.__post_init__(self)
        if not 2 <= self.orders <= 16 or not 0 <= self.max_disagreement <= 1:
            raise UserError("Listwise: orders is from 2 to 16, max_disagreement from 0 to 1", fix="such as orders=2, max_disagreement=0.5")

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        problem, reference = question_text(task), reference_text(task, self.reference)
        why = [non_answer_reason(one.answer, question=user_text(task), reference=reference) for one in episodes]
        texts = list(dict.fromkeys(answer_text(one) for one, empty in zip(episodes, why, strict=True) if not empty))
        if len(texts) > MOST:
            return self._all(episodes, JudgeAnswer(reason=f"{len(texts)} different answers, at most {MOST} are ranked at once"))
        if len(texts) < 2 and not any(why):  # nothing is better than anything: no advantage, and no fault of anybody's
            return tuple(
                Score(value=0.5, parts={"disagreement": 0.0}, evidence=f"{self.name}: the answers are all the same") for _ in episodes
            )
        ranks, heard = await self._ranks(problem, texts)
        if ranks is None:
            return self._all(episodes, heard)
        apart = rank_disagreement(ranks)
        if apart > self.max_disagreement:
            return self._all(
                episodes, JudgeAnswer(reason=f"its orders disagree by {apart:.2f}, at most {self.max_disagreement:g} is allowed")
            )
        places = {text: _mean_place(index, ranks, len(texts)) for index, text in enumerate(texts)}
        values = [0.0 if empty else places[answer_text(one)] for one, empty in zip(episodes, why, strict=True)]
        return tuple(
            Score(value=value, parts={"disagreement": apart}, evidence=f"{self.name}: {empty or heard.text}")
            for value, empty in zip(values, why, strict=True)
        )

    def _all(self, episodes: Sequence[Episode], heard: JudgeAnswer) -> tuple[Score, ...]:
        return tuple(unscored(self.name, heard) for _ in episodes)

    async def _ranks(self, problem: str, texts: Sequence[str]) -> tuple[list[list[int]] | None, JudgeAnswer]:
        """The place of each text in each order, 0 being the best; None with what went wrong."""
        if len(texts) < 2:
            return [[0] * len(texts)] * self.orders, JudgeAnswer()
        asker = self._asker()
        shuffles = _shuffles(len(texts), self.orders, seed=digest([problem, list(texts)]))
        count = len(texts)

        def read(said: dict[str, Any]) -> tuple[tuple[int, ...], str]:
            return verdict.ranking(said, count), verdict.reasoning(said)

        questions = [self._question(problem, [texts[index] for index in order]) for order in shuffles]
        all_heard = await asyncio.gather(*(asker.ask(one, read, draw=number) for number, one in enumerate(questions)))
        failed = next((heard for heard in all_heard if heard.verdict is None), None)
        if failed is not None:
            return None, failed
        ranks = []
        for order, heard in zip(shuffles, all_heard, strict=True):
            best_first = [order[shown - 1] for shown in heard.verdict[0]]
            ranks.append([best_first.index(index) for index in range(count)])
        return ranks, JudgeAnswer(text=all_heard[0].verdict[1])

    def _question(self, problem: str, texts: Sequence[str]) -> ChatQuery:
        most = _MAX_ANSWERS // len(texts)
        data = {
            "question": truncate_middle(problem, most),
            **{f"answer {number}": truncate_middle(text, most) for number, text in enumerate(texts, 1)},
        }
        places = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": len(texts)}}
        return ChatQuery(instructions=self._instructions(), data=data, schema=verdict.schema({"ranking": places}))

    def _instructions(self) -> str:
        return (
            "You rank answers to one question. In ranking, give the numbers of all answers, each once, the best first. "
            f"{self.criteria} The order in which they are shown means nothing. Keep the reasoning short."
        )

    def _asks(self) -> dict[str, Any]:
        return {"instructions": self._instructions(), "orders": self.orders, "max_disagreement": self.max_disagreement}


def rank_disagreement(ranks: Sequence[Sequence[int]]) -> float:
    """1 - W, where W is Kendall's coefficient of concordance (Kendall and Babington Smith 1939): 0 when all orders are the same.

    Args:
        ranks: [orders][answers] places, without ties. Fewer than two answers cannot be ordered apart: 0.
    """
    count, orders = len(ranks[0]), len(ranks)
    if count < 2:
        return 0.0
    sums = [sum(one[index] for one in ranks) for index in range(count)]
    mean = sum(sums) / count
    spread = sum((one - mean) ** 2 for one in sums)
    return max(0.0, 1.0 - 12.0 * spread / (orders**2 * (count**3 - count)))


def _shuffles(count: int, orders: int, *, seed: str) -> list[list[int]]:
    """Orders in which the answers are shown: one and its reverse first, so that no answer has the better place in both."""
    draw = random.Random(seed)
    found: list[list[int]] = []
    for number in itertools.count():
        if len(found) >= orders:
            return found
        if number % 2:
            found.append(found[-1][::-1])
        else:
            found.append(draw.sample(range(count), count))
    raise AssertionError("unreachable")


def _mean_place(index: int, ranks: Sequence[Sequence[int]], count: int) -> float:
    """From 0, the last place in every order, to 1, the first in every one."""
    if count < 2:
        return 1.0
    return 1.0 - sum(one[index] for one in ranks) / (len(ranks) * (count - 1))

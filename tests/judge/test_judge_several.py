"""Several verdicts: ensembles, pairs in both orders, rankings of a group."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import JudgeError, TaskError, UserError
from agentrl.judge import Ensemble, Judge, Listwise, Pairwise
from agentrl.judge import ensemble as ensembles
from agentrl.judge import listwise as lists
from agentrl.judge.scoring import CORRECT
from agentrl.records import Blame, Episode, Score, Task
from agentrl.reward import TaskScorer
from agentrl.testing import ChatServer, ScriptedAnswer
from tests.judge.judge_parts import TASK, endpoint, episode, scores, task


class Fixed:
    """A verifier that returns a fixed result, or raises it."""

    def __init__(self, result: Any) -> None:
        self.result = result

    async def __call__(self, task: Task, episode: Episode) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return Score(value=self.result, reason="unsure") if self.result is None or isinstance(self.result, float) else self.result


async def ensemble_score(*values: Any, **options: Any) -> Score:
    return await Ensemble(judges={f"j{number}": Fixed(value) for number, value in enumerate(values)}, **options)(TASK, episode())


async def test_ensemble_agrees_or_abstains_and_reports_the_disagreement() -> None:
    score = await ensemble_score(1.0, 0.8, 0.9)
    assert score.value == 0.9 and score.parts["disagreement"] == pytest.approx(0.4 / 3)
    assert score.parts["j0"] == 1.0 and score.parts["judges"] == 3
    assert (await ensemble_score(1.0, 0.8, 0.9, aggregate="mean")).value == pytest.approx(0.9)
    disagreeing = await ensemble_score(1.0, 0.0, 1.0)
    assert disagreeing.value is None and "disagree by 0.67" in disagreeing.reason and disagreeing.blame is None
    assert (await ensemble_score(1.0, 0.0, 1.0, aggregate="majority", max_disagreement=0.7)).value == 1.0
    assert "is tied" in (await ensemble_score(1.0, 0.0, aggregate="majority", max_disagreement=1.0)).reason


async def test_missing_quorum_is_blamed_on_the_infrastructure() -> None:
    down = JudgeError("down")
    assert (await ensemble_score(1.0, 1.0, None)).value == 1.0 and (await ensemble_score(1.0, 1.0, down)).parts["judges"] == 2
    for broken in (ValueError("a bug"), "a string", Score(value=float("inf"), reason="x"), float("-inf")):
        assert (await ensemble_score(1.0, 1.0, broken)).value == 1.0
    unsure = await ensemble_score(1.0, None, None)
    assert unsure.value is None and "1 of 3 judges" in unsure.reason and unsure.blame is None and "j1: unsure" in unsure.evidence
    assert (await ensemble_score(1.0, None, down)).blame is Blame.INFRASTRUCTURE
    assert (await ensemble_score(1.0, None, down, quorum=1)).value == 1.0


async def test_missing_quorum_is_blamed_on_the_task() -> None:
    invalid, down = TaskError("the truth is invalid"), JudgeError("down")
    for members in ((invalid, invalid, invalid), (1.0, invalid, None), (invalid, down, None), (1.0, invalid, ValueError("a bug"))):
        score = await ensemble_score(*members)
        assert score.value is None and score.blame is Blame.TASK and "the truth is invalid" in score.evidence
    assert (await ensemble_score(1.0, invalid, down)).blame is Blame.INFRASTRUCTURE
    assert (await ensemble_score(invalid, ValueError("a bug"), None)).blame is Blame.POLICY
    assert (await ensemble_score(invalid, None, None)).blame is None


@pytest.mark.parametrize(
    "options",
    [
        {"quorum": 0},
        {"quorum": 4},
        {"min_agreement": 0.8},
        {"min_coverage": 0.8},
        {"judges": {"a": Fixed(1.0)}},
        {"aggregate": "medain"},
        {"aggregate": "majority", "threshold": float("nan")},
    ],
)
def test_invalid_ensembles_raise(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Ensemble(**{"judges": dict.fromkeys("abc", Fixed(1.0)), **options})


def test_duplicate_judges_raise() -> None:
    """The cache would give the second one the answer of the first, and the two would always agree."""
    first, second = (Judge(endpoint=endpoint(f"http://127.0.0.1:{port}/v1"), form=CORRECT) for port in (8000, 8001))
    with pytest.raises(UserError, match="cached answers"):
        Ensemble(judges={"a": first, "b": second})
    differs = Judge(endpoint=endpoint("http://127.0.0.1:8001/v1", revision="32b"), form=CORRECT)
    assert Ensemble(judges={"a": first, "b": differs}).identity


async def test_identity_of_an_ensemble_depends_on_its_members() -> None:
    with ChatServer([ScriptedAnswer(scores(correct=1))]) as server:
        first, second = (Judge(endpoint=endpoint(server.url, seed=seed), form=CORRECT) for seed in (1, 2))
        both = Ensemble(judges={"a": first, "b": second})
        assert (await both(TASK, episode())).value == 1.0 and both.spent().calls == 2
        await both.close()
    assert both.identity and both.identity != Ensemble(judges={"a": second, "b": first}).identity
    assert Ensemble(judges={"a": first, "b": Fixed(1.0)}).identity == "", "with a verifier without an identity, the ensemble has none"
    assert both.timeout_s > first.endpoint.patience_s


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_disagreement_is_the_mean_difference(values: list[float]) -> None:
    difference = ensembles.mean_difference(values)
    assert 0 <= difference <= (max(values) - min(values)) + 1e-12
    assert (difference == 0) == (len(set(values)) == 1)


def comparison(body: Any, prefers: str) -> str:
    """The verdict of a judge that prefers the answer with a word, or position A."""
    a = re.search(r"<<<BEGIN ANSWER A.*?<<<END ANSWER A", body["messages"][1]["content"], re.DOTALL)
    b = re.search(r"<<<BEGIN ANSWER B.*?<<<END ANSWER B", body["messages"][1]["content"], re.DOTALL)
    assert a and b
    side = "A" if prefers == "position A" or prefers in a[0] else "B" if prefers in b[0] else "tie"
    return json.dumps({"reasoning": "r", "better": side, "abstain": False})


@pytest.mark.parametrize(("prefers", "value"), [("Lyon", 1.0), ("Paris", 0.0), ("Rome", 0.5), ("position A", None)])
async def test_comparison_counts_only_if_both_orders_agree(prefers: str, value: float | None) -> None:
    with ChatServer(lambda body, number: ScriptedAnswer(comparison(body, prefers))) as server:
        judge = Pairwise(endpoint=endpoint(server.url))
        score = await judge(TASK, episode("Lyon"))
        assert score.value == value and len(server.requests) == 2
        if value is None:
            assert "prefers A in one order and A in the other" in score.reason and score.blame is None
        assert (await judge(TASK, episode(None))).value == 0.0
        assert "no reference" in (await judge(task(answer=None), episode("Lyon"))).reason
        await judge.close()


async def test_answer_that_equals_the_reference_is_as_good() -> None:
    with ChatServer(lambda body, number: ScriptedAnswer(comparison(body, "position A"))) as server:
        judge = Pairwise(endpoint=endpoint(server.url))
        assert (await judge(TASK, episode(" Paris\n"))).value == 0.5 and server.requests == []
        await judge.close()


async def test_pair_with_an_unreadable_order_is_unscored() -> None:
    with ChatServer([ScriptedAnswer(json.dumps({"better": "A"})), ScriptedAnswer("I like both")]) as server:
        judge = Pairwise(endpoint=endpoint(server.url))
        score = await judge(TASK, episode("Lyon"))
        await judge.close()
    assert score.value is None and "unreadable" in score.reason and score.evidence == "I like both"


def ranking(body: Any, by: str) -> str:
    """A ranking of the answers shown: by their text or by their position."""
    answers = re.findall(r"<<<BEGIN ANSWER \d+ \w+>>>\n(.*?)\n<<<END", body["messages"][1]["content"], re.DOTALL)
    order = sorted(range(len(answers)), key=lambda index: answers[index] if by == "text" else index)
    return json.dumps({"reasoning": "r", "ranking": [index + 1 for index in order]})


async def test_ranking_does_not_depend_on_the_order_shown() -> None:
    group = [episode(text) for text in ("c", "a", "b", "a")] + [episode(None)]
    with ChatServer(lambda body, number: ScriptedAnswer(ranking(body, "text"))) as server:
        judge = Listwise(endpoint=endpoint(server.url), orders=4)
        scores = await judge(TASK, group)
        await judge.close()
    assert [score.value for score in scores] == [0.0, 1.0, 0.5, 1.0, 0.0]
    assert {score.parts["disagreement"] for score in scores} == {0.0}


async def test_question_of_a_large_group_is_shown_completely() -> None:
    question = "Which word? " + "x" * 6000 + " MIDDLE " + "x" * 6000
    with ChatServer(lambda body, number: ScriptedAnswer(ranking(body, "text"))) as server:
        judge = Listwise(endpoint=endpoint(server.url))
        await judge(task(question), [episode(f"word {number}") for number in range(lists.MOST)])
        await judge.close()
    assert all(question in request["body"]["messages"][1]["content"] for request in server.requests)


async def test_judge_with_position_bias_is_unscored() -> None:
    with ChatServer(lambda body, number: ScriptedAnswer(ranking(body, "place"))) as server:
        judge = Listwise(endpoint=endpoint(server.url))
        scores = await judge(TASK, [episode(text) for text in "abcd"])
        assert {score.value for score in scores} == {None} and "rankings disagree by 1.00" in scores[0].reason
        requests_before = len(server.requests)
        assert {score.value for score in await judge(TASK, [episode("a"), episode("a")])} == {0.5}, "equal answers need no query"
        assert len(server.requests) == requests_before
        assert [score.value for score in await judge(TASK, [episode("a"), episode(":")])] == [1.0, 0.0]
        await judge.close()


@given(st.integers(2, 6), st.integers(2, 5), st.randoms(use_true_random=False))
def test_concordance_is_from_0_to_1(count: int, orders: int, draw: Any) -> None:
    ranks = [draw.sample(range(count), count) for _ in range(orders)]
    assert 0 <= lists.rank_disagreement(ranks) <= 1
    assert lists.rank_disagreement([ranks[0]] * orders) == pytest.approx(0)
    assert lists.rank_disagreement([ranks[0], [count - 1 - rank for rank in ranks[0]]]) == pytest.approx(1)


async def test_cancelling_an_ensemble_cancels_its_members() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(task: Task, episode: Episode) -> Score:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return Score(value=1.0)

    job = asyncio.create_task(Ensemble(judges={"a": slow, "b": slow})(TASK, episode()))
    await began.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert ended.is_set()


async def test_members_provoked_by_the_episode_do_not_leave_it_unscored() -> None:
    async def fragile(task: Task, episode: Episode) -> Score:
        if episode.answer == "boom":
            raise RecursionError
        return Score(value=0.0)

    async def also_fragile(task: Task, episode: Episode) -> Score:
        return await fragile(task, episode)

    async def sound(task: Task, episode: Episode) -> Score:
        return Score(value=0.5)

    ensemble = Ensemble(judges={"a": fragile, "b": also_fragile, "c": sound})
    scorer = TaskScorer(_verifiers={"v": ensemble})
    score = await scorer(replace(TASK, verifiers=("v",)), replace(episode(), answer="boom"))
    assert score.value == 0.0, score.reason

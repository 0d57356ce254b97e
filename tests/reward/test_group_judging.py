"""Group judging: attempts shown, judges that abstain, fail or return invalid scores, and the weight of verifiers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import JudgeError, PluginError, TaskError
from agentrl.protocols.reward import AWAITING_GROUP_JUDGE
from agentrl.records import Blame, Episode, Failure, Message, PendingPart, SandboxSpec, Score, ScoredEpisode, Split, Task, Trajectory
from agentrl.reward import TaskScorer
from agentrl.reward.group_judging import GroupJudgeScorer, load_group_judge

TASK = Task(
    id="t",
    family="demo",
    prompt=(Message(role="user", content="How many?"),),
    tools=(),
    sandbox=SandboxSpec(image="sandboxes/tables"),
    verifiers=("tests.reward.test_group_judging:half",),
    data={},
    split=Split.TRAIN,
)
JUDGES_MODULE = """
async def alone(task, episode): ...
async def fine(task, episodes): ...
class Kind:
    async def __call__(self, task, episodes): ...
number = 3
"""
WAITING = Score(value=None, reason=AWAITING_GROUP_JUDGE)


async def half(task: Task, episode: Episode) -> Score:
    return Score(value=0.5, parts={"x": 1.0})


async def audit(task: Task, episode: Episode) -> Score:
    return Score(value=0.25)


class Ranks:
    """Scores each answer with the number in it, or returns or raises `result`. `shown` records the answers of each call."""

    def __init__(self, result: Any = None) -> None:
        self.result, self.shown = result, list[list[str | None]]()

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Any:
        self.shown.append([e.answer for e in episodes])
        if isinstance(self.result, BaseException):
            raise self.result
        if self.result is not None:
            return self.result
        return tuple(Score(value=None, reason="unsure") if e.answer == "?" else Score(value=float(e.answer or 0)) for e in episodes)


def ended(answer: str | None, score: Score = WAITING, *, fault: bool = False) -> ScoredEpisode:
    failures = (Failure(stage="chat", blame=Blame.INFRASTRUCTURE, kind="x", message="down"),) if fault else ()
    episode = Episode(id=f"e{answer}", task_id=TASK.id, task_key=TASK.key, trajectories=(), answer=answer, failures=failures)
    return ScoredEpisode(episode=episode, score=Score(value=None, reason="left out: it") if fault else score)


def scorer(judge: Any, *, weight: float = 1.0, **alone: Any) -> GroupJudgeScorer:
    return GroupJudgeScorer(judge=judge, name="rank", weight=weight, task_scorer=TaskScorer(max_retries=1, **alone))


async def test_group_is_judged_without_excluded_attempts() -> None:
    judge = Ranks()
    first, out, last = await scorer(judge).score_group(TASK, [ended("1"), ended("0.5", fault=True), ended("0.25")])
    assert judge.shown == [["1", "0.25"]]
    assert (first.value, out.value, last.value) == (1.0, None, 0.25) and out.reason == "left out: it" and first.parts == {"rank": 1.0}
    assert (await scorer(judge).score_attempt(TASK, ended("1").episode)) == WAITING


async def test_an_abstention_is_unscored_and_the_others_count() -> None:
    unsure, sure = await scorer(Ranks()).score_group(TASK, [ended("?"), ended("0")])
    assert unsure.value is None and "unsure" in unsure.reason and unsure.blame is None and sure.value == 0.0


@pytest.mark.parametrize(
    ("result", "blame", "reason"),
    [
        (JudgeError("nobody answers"), Blame.INFRASTRUCTURE, "nobody answers"),
        (TaskError("no reference"), Blame.TASK, "no reference"),
        (ValueError("a bug"), None, "a bug"),
        ((Score(value=1.0),), None, "1 scores"),
        ("nonsense", None, "str"),
        ((Score(value=1.0), "x"), None, "not a Score"),
        ((Score(value=1.0), Score(value=float("inf"))), None, "inf"),
    ],
)
async def test_misbehaving_judge_leaves_attempts_unscored(result: Any, blame: Blame | None, reason: str) -> None:
    judge = Ranks(result)
    scores = await scorer(judge).score_group(TASK, [ended("1"), ended("0")])
    assert {score.value for score in scores} == {None} and all(reason in score.reason and score.blame is blame for score in scores)
    calls = {Blame.INFRASTRUCTURE: 2, Blame.TASK: 1, None: 4}[blame]
    assert len(judge.shown) == calls, "a passing fault is retried, and a fault that may be provoked is checked with harmless answers"


class Fragile(Ranks):
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Any:
        if any(episode.answer == "9**9**9" for episode in episodes):
            await asyncio.sleep(60)
        if any(episode.answer == "boom" for episode in episodes):
            raise RecursionError("too deep")
        if any(episode.answer == "HTTP 503" for episode in episodes):
            raise RuntimeError("cannot compare HTTP 503 with others")
        return tuple(Score(value=float(episode.answer or 0)) for episode in episodes)


@pytest.mark.parametrize("answer", ["boom", "HTTP 503", "9**9**9"])
async def test_attempt_that_breaks_the_judge_does_not_exclude_its_group(answer: str) -> None:
    scores = await scorer(Fragile(), timeout_s=0.3).score_group(TASK, [ended("1"), ended(answer), ended("-2"), ended(answer)])
    assert [score.value for score in scores] == [1.0, -2.0, -2.0, -2.0]
    assert "because of this attempt's text" in scores[1].evidence


class Blames(Ranks):
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Any:
        boom = Score(value=None, reason="too deep", blame=Blame.POLICY)
        return tuple(boom if episode.answer == "boom" else Score(value=float(episode.answer or 0)) for episode in episodes)


@pytest.mark.parametrize("index", range(3))
async def test_attempt_that_the_judge_blames_gets_the_lowest_value_at_any_position(index: int) -> None:
    answers = ["1", "-2"]
    answers.insert(index, "boom")
    scores = await scorer(Blames()).score_group(TASK, [ended(answer) for answer in answers])
    values = dict(zip(answers, (score.value for score in scores), strict=True))
    assert values == {"1": 1.0, "-2": -2.0, "boom": -2.0} and scores[index].evidence.startswith("too deep, because of")


async def test_attempts_that_all_break_the_judge_get_the_lowest_value() -> None:
    scores = await scorer(Fragile()).score_group(TASK, [ended("boom"), ended("boom")])
    assert [score.value for score in scores] == [0.0, 0.0]


async def test_judge_with_unreachable_server_is_retried() -> None:
    judge = Ranks(ConnectionRefusedError("connection refused"))
    scores = await scorer(judge).score_group(TASK, [ended("1"), ended("0")])
    assert {score.blame for score in scores} == {Blame.INFRASTRUCTURE} and len(judge.shown) == 2


async def test_single_attempt_is_unscored() -> None:
    judge = Ranks()
    (alone, _) = await scorer(judge).score_group(TASK, [ended("1"), ended("1", fault=True)])
    assert alone.value is None and "no other attempt" in alone.reason and judge.shown == []


async def test_verifiers_are_weighted_and_unscored_attempts_are_not_shown() -> None:
    judge, group_scorer = Ranks(), scorer(Ranks(), weight=0.25)
    group_scorer = replace(group_scorer, judge=judge)
    first = await group_scorer.score_attempt(TASK, ended("1").episode)
    assert first.value == 0.5
    late = await group_scorer.score_attempt(replace(TASK, verifiers=("rewards.late:late",)), ended("1").episode)
    assert late.is_absent and "tasks.group_judge does not support late scores" in late.reason
    broken = Score(value=None, reason="verifier raised")
    high, low, unscored = await group_scorer.score_group(TASK, [ended("1", first), ended("0", first), ended("0.5", broken)])
    assert (high.value, low.value, unscored) == (0.625, 0.375, broken) and judge.shown == [["1", "0"]]
    assert high.parts["rank"] == 1.0 and high.parts["tests.reward.test_group_judging:half/x"] == 1.0


async def test_late_score_of_the_judge_is_unscored() -> None:
    late = Score(value=None, pending=(PendingPart(name="human", low=0.0, high=1.0),))
    for weight in (1.0, 0.5):
        first, _ = await scorer(Ranks((late, late)), weight=weight).score_group(TASK, [ended("1", Score(value=0.5))] * 2)
        assert first.is_absent and "does not support late scores" in first.reason


async def test_values_of_single_trajectories_are_weighted() -> None:
    episode = replace(ended("1").episode, trajectories=(Trajectory(agent="main", turns=()), Trajectory(agent="helper", turns=())))
    attempt = ScoredEpisode(episode=episode, score=Score(value=0.5, branches=(None, 0.0), without=(0.25, None)))
    scored, _ = await scorer(Ranks(), weight=0.25).score_group(TASK, [attempt, attempt])
    assert (scored.value, scored.branches, scored.without) == (0.625, (None, 0.25), (0.4375, None))


async def test_audit_runs_on_attempts_that_the_judge_scored() -> None:
    name = "tests.reward.test_group_judging:audit"
    scored, unsure = await scorer(Ranks(), audit=(name,)).score_group(TASK, [ended("1"), ended("?")])
    assert scored.value == 1.0 and scored.parts["audit"] == 0.25 and "audit" not in unsure.parts


def test_invalid_group_judge_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_judges.py").write_text(JUDGES_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("Kind", "number"):
        with pytest.raises(PluginError, match="is not a group judge"):
            load_group_judge(f"their_judges:{name}")
    with pytest.raises(PluginError, match=r"tasks\.group_judge"):
        load_group_judge("their_judges:alone")
    assert load_group_judge("their_judges:fine")
    sys.modules.pop("their_judges", None)

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
from agentrl.records import Blame, Episode, Failure, Message, SandboxSpec, Score, ScoredEpisode, Split, Task
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
THEIRS = """
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
    """Gives the answers' own numbers, and keeps what it was shown; or does what it is told."""

    def __init__(self, does: Any = None) -> None:
        self.does, self.shown = does, list[list[str | None]]()

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Any:
        self.shown.append([one.answer for one in episodes])
        if isinstance(self.does, BaseException):
            raise self.does
        if self.does is not None:
            return self.does
        return tuple(Score(value=None, reason="unsure") if one.answer == "?" else Score(value=float(one.answer or 0)) for one in episodes)


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
    ("does", "blame", "told"),
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
async def test_misbehaving_judge_leaves_attempts_unscored(does: Any, blame: Blame | None, told: str) -> None:
    judge = Ranks(does)
    scores = await scorer(judge).score_group(TASK, [ended("1"), ended("0")])
    assert {score.value for score in scores} == {None} and all(told in score.reason and score.blame is blame for score in scores)
    calls = {Blame.INFRASTRUCTURE: 2, Blame.TASK: 1, None: 4}[blame]
    assert len(judge.shown) == calls, "what may pass is asked again, and what may be provoked about harmless answers"


class Fragile(Ranks):
    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Any:
        if any(one.answer == "9**9**9" for one in episodes):
            await asyncio.sleep(60)
        if any(one.answer == "boom" for one in episodes):
            raise RecursionError("too deep")
        if any(one.answer == "HTTP 503" for one in episodes):
            raise RuntimeError("cannot compare HTTP 503 with others")
        return tuple(Score(value=float(one.answer or 0)) for one in episodes)


@pytest.mark.parametrize("said", ["boom", "HTTP 503", "9**9**9"])
async def test_attempt_that_breaks_the_judge_does_not_exclude_its_group(said: str) -> None:
    scores = await scorer(Fragile(), timeout_s=0.3).score_group(TASK, [ended("1"), ended(said), ended("-2"), ended(said)])
    assert [score.value for score in scores] == [1.0, -2.0, -2.0, -2.0]
    assert "because of this attempt's text" in scores[1].evidence


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
    judge, mine = Ranks(), scorer(Ranks(), weight=0.25)
    mine = replace(mine, judge=judge)
    first = await mine.score_attempt(TASK, ended("1").episode)
    assert first.value == 0.5
    late = await mine.score_attempt(replace(TASK, verifiers=("rewards.late:late",)), ended("1").episode)
    assert late.is_absent and "cannot wait for late scores" in late.reason
    broken = Score(value=None, reason="verifier raised")
    one, two, out = await mine.score_group(TASK, [ended("1", first), ended("0", first), ended("0.5", broken)])
    assert (one.value, two.value, out) == (0.625, 0.375, broken) and judge.shown == [["1", "0"]]
    assert one.parts["rank"] == 1.0 and one.parts["tests.reward.test_group_judging:half/x"] == 1.0


async def test_audit_runs_on_attempts_that_the_judge_scored() -> None:
    name = "tests.reward.test_group_judging:audit"
    one, unsure = await scorer(Ranks(), audit=(name,)).score_group(TASK, [ended("1"), ended("?")])
    assert one.value == 1.0 and one.parts["audit"] == 0.25 and "audit" not in unsure.parts


def test_invalid_group_judge_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_judges.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("Kind", "number"):
        with pytest.raises(PluginError, match="is not a group judge"):
            load_group_judge(f"their_judges:{name}")
    with pytest.raises(PluginError, match=r"tasks\.group_judge"):
        load_group_judge("their_judges:alone")
    assert load_group_judge("their_judges:fine")
    sys.modules.pop("their_judges", None)

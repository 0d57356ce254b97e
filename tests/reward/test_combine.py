"""Combining scores: trajectories of several verifiers, and the audit, which does not change the reward but can contradict it."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from agentrl.config import TasksConfig, build
from agentrl.errors import RecipeError
from agentrl.records import Episode, Message, PendingPart, SandboxSpec, Score, ScoredEpisode, Split, Task
from agentrl.reward import Rubric, TaskScorer
from agentrl.reward.scorer import AUDIT_PART, add_audit, add_branches, audit_contradiction
from agentrl.session.measure import MAX_PARTS, score_part_means
from rewards.late import Late

HERE = "tests.reward.test_combine"


async def generous(task: Task, episode: Episode) -> Score:
    return Score(value=1.0, parts={"audit": 7.0, "audit/forged": 7.0, "length": 3.0}, evidence="well done")


async def strict(task: Task, episode: Episode) -> Score:
    return Score(value=0.25, evidence="the file\x1b[2J was not written")


async def broken(task: Task, episode: Episode) -> Score:
    raise RuntimeError("no")


TASK = Task(
    id="t",
    family="f",
    prompt=(Message(role="user", content="?"),),
    tools=(),
    sandbox=SandboxSpec(image="none"),
    verifiers=(f"{HERE}:generous",),
    data={},
    split=Split.TRAIN,
)
EPISODE = Episode(id="e", task_id="t", task_key=TASK.key, trajectories=(), answer="x")


async def reviewed(task: Task, episode: Episode) -> Score:
    return Score(value=None, parts={"length": 3.0}, partial=0.5, pending=(PendingPart(name="style", weight=0.25, high=2.0),))


late = Late(part="human", low=-1.0, expires_s=60.0)
again = Late(part="human")
in_a_rubric = Rubric(parts={"strict": (strict, 0.5), "late": (late, 0.5)})


def scored(score: Score) -> ScoredEpisode:
    return ScoredEpisode(episode=EPISODE, score=score)


async def test_audit_does_not_change_the_reward_but_can_contradict_it() -> None:
    plain = await TaskScorer()(TASK, EPISODE)
    score = await TaskScorer(audit=(f"{HERE}:strict",))(TASK, EPISODE)
    assert score.value == plain.value == 1.0 and score.turn_rewards == plain.turn_rewards
    assert score.parts[AUDIT_PART] == score.parts[f"audit/{HERE}:strict"] == 0.25
    message = audit_contradiction(TASK, scored(score))
    assert message.startswith("the audit is 0.25, but the reward is 1: audit ") and "\x1b" not in message
    assert audit_contradiction(TASK, scored(plain)) == ""


async def test_failing_audit_adds_no_part_and_no_contradiction() -> None:
    score = await TaskScorer(audit=(f"{HERE}:strict", f"{HERE}:broken"))(TASK, EPISODE)
    assert score.value == 1.0 and AUDIT_PART not in score.parts and f"audit/{HERE}:strict" in score.parts
    assert "RuntimeError" in score.evidence and audit_contradiction(TASK, scored(score)) == ""


@pytest.mark.parametrize(("value", "audit", "contradicts"), [(1.0, 0.49, True), (1.0, 0.5, False), (0.9, 0.0, False), (2.0, 0.9, True)])
def test_only_a_high_reward_is_contradicted(value: float, audit: float, contradicts: bool) -> None:
    score = add_audit(Score(value=value), {"one": Score(value=audit)})
    assert bool(audit_contradiction(TASK, scored(score))) is contradicts


def test_verifier_cannot_write_the_audit_part() -> None:
    forged = Score(value=1.0, parts={"audit": 1.0, "audit/strict": 1.0})
    assert add_audit(forged, {"strict": Score(value=None, reason="down")}).parts == {}


def test_step_metrics_contain_the_parts_within_limits() -> None:
    many = {f"p{n}": 1.0 for n in range(100)} | {"ensemble/disagreement": 0.5, AUDIT_PART: 0.5, "bad\x1bname": 1.0, "endless": math.inf}
    means = score_part_means(
        [scored(Score(value=1.0, parts=many)), scored(Score(value=0.0, parts={AUDIT_PART: 0.1, "zz": 4.0, "p99": 3.0}))]
    )
    assert means["audit_mean"] == pytest.approx(0.3) and means["judge_disagreement"] == 0.5 and means["part/p99"] == 2.0
    assert sum(name.startswith("part/") for name in means) == MAX_PARTS
    assert all(name.isprintable() and math.isfinite(value) for name, value in means.items())


def test_recipe_rejects_a_verifier_that_audits_itself() -> None:
    with pytest.raises(RecipeError, match="an audit with the same verifier"):
        build({"name": "x", "policy": {"model": "m"}, "tasks": {"family": "f:F", "verifiers": ["a:b"], "audit": ["a:b"]}})
    assert TasksConfig(family="f:F", audit=("a:b",)).audit == ("a:b",)


def test_verifiers_without_branch_scores_contribute_their_value() -> None:
    judged = Score(value=1.0, branches=(None, 0.0, 0.5), without=(None, 0.0, None))
    plain = Score(value=0.4)
    combined = add_branches(Score(value=0.7), [(0.75, judged), (0.25, plain)])
    assert combined.branches == (None, 0.1, 0.475) and combined.without == (None, 0.1, None) and combined.value == 0.7
    assert add_branches(Score(value=0.4), [(1.0, plain)]) == plain


def task_of(*names: str) -> Task:
    return replace(TASK, verifiers=tuple(f"{HERE}:{name}" for name in names))


async def test_late_parts_are_averaged_with_the_scores_that_are_known() -> None:
    """strict gives 0.25, reviewed 0.5 + 0.25 * style, late the human's value."""
    now = time.time()
    score = await TaskScorer(audit=(f"{HERE}:generous",))(task_of("strict", "reviewed", "late"), EPISODE)
    assert score.value is None and not score.is_absent and score.partial == (0.25 + 0.5) / 3
    style, human = score.pending
    assert score.reason == "waits for late scores: style, human"
    assert (style.name, style.weight, style.high, style.expires_at) == ("style", 0.25 / 3, 2.0, None)
    assert (human.name, human.weight, human.low) == ("human", 1 / 3, -1.0) and 59.0 < (human.expires_at or 0.0) - now < 90.0
    complete = score.with_part("human", -1.0).with_part("style", 2.0)
    assert complete.value == pytest.approx((0.25 + (0.5 + 0.25 * 2.0) - 1.0) / 3)
    assert complete.parts[f"{HERE}:strict"] == 0.25 and complete.parts["human"] == -1.0 and complete.parts[AUDIT_PART] == 1.0
    assert score.with_part("human", None).is_absent, "an expired part does not count as 0"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("late", "again"), "two verifiers wait for late parts with the same name"),
        (("late", "broken"), "raised RuntimeError"),
        (("in_a_rubric",), "a rubric cannot wait for a late score"),
    ],
)
async def test_late_parts_that_cannot_be_combined_leave_the_episode_unscored(names: tuple[str, ...], reason: str) -> None:
    score = await TaskScorer()(task_of(*names), EPISODE)
    assert score.is_absent and reason in score.reason

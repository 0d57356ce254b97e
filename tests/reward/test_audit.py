"""The audit: it is logged beside the score, moves no reward, and speaks where it contradicts one."""

from __future__ import annotations

import math

import pytest

from agentrl.config import TasksConfig, build
from agentrl.errors import RecipeError
from agentrl.records import Episode, Message, SandboxSpec, Score, ScoredEpisode, Split, Task
from agentrl.reward import TaskScorer
from agentrl.reward.audit import AUDIT_PART, add_audit, audit_contradiction
from agentrl.session.measure import MAX_PARTS, score_part_means

HERE = "tests.reward.test_audit"


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


def scored(score: Score) -> ScoredEpisode:
    return ScoredEpisode(episode=EPISODE, score=score)


async def test_an_audit_moves_no_reward_and_contradicts_it() -> None:
    plain = await TaskScorer()(TASK, EPISODE)
    score = await TaskScorer(audit=(f"{HERE}:strict",))(TASK, EPISODE)
    assert score.value == plain.value == 1.0 and score.turn_rewards == plain.turn_rewards
    assert score.parts[AUDIT_PART] == score.parts[f"audit/{HERE}:strict"] == 0.25
    said = audit_contradiction(TASK, scored(score), below=1.0)
    assert said.startswith("the audit gives 0.25 where the reward is 1: audit ") and "\x1b" not in said
    assert audit_contradiction(TASK, scored(plain), below=1.0) == ""


async def test_an_audit_that_breaks_leaves_no_part_and_no_verdict() -> None:
    score = await TaskScorer(audit=(f"{HERE}:strict", f"{HERE}:broken"))(TASK, EPISODE)
    assert score.value == 1.0 and AUDIT_PART not in score.parts and f"audit/{HERE}:strict" in score.parts
    assert "RuntimeError" in score.evidence and audit_contradiction(TASK, scored(score), below=1.0) == ""


@pytest.mark.parametrize(("value", "audit", "speaks"), [(1.0, 0.49, True), (1.0, 0.5, False), (0.9, 0.0, False), (2.0, 0.9, True)])
def test_only_a_high_reward_is_contradicted(value: float, audit: float, speaks: bool) -> None:
    score = add_audit(Score(value=value), {"one": Score(value=audit)})
    assert bool(audit_contradiction(TASK, scored(score), below=1.0)) is speaks


def test_a_verifier_cannot_write_the_audits_part() -> None:
    forged = Score(value=1.0, parts={"audit": 1.0, "audit/strict": 1.0})
    assert add_audit(forged, {"strict": Score(value=None, reason="down")}).parts == {}


def test_step_figures_hold_the_parts_within_bounds() -> None:
    many = {f"p{n}": 1.0 for n in range(100)} | {"ensemble/disagreement": 0.5, AUDIT_PART: 0.5, "bad\x1bname": 1.0, "endless": math.inf}
    means = score_part_means(
        [scored(Score(value=1.0, parts=many)), scored(Score(value=0.0, parts={AUDIT_PART: 0.1, "zz": 4.0, "p99": 3.0}))]
    )
    assert means["audit_mean"] == pytest.approx(0.3) and means["judge_disagreement"] == 0.5 and means["part/p99"] == 2.0
    assert sum(name.startswith("part/") for name in means) == MAX_PARTS
    assert all(name.isprintable() and math.isfinite(value) for name, value in means.items())


def test_a_recipe_has_no_verifier_that_audits_itself() -> None:
    with pytest.raises(RecipeError, match="an audit that agrees with itself"):
        build({"name": "x", "policy": {"model": "m"}, "tasks": {"family": "f:F", "verifiers": ["a:b"], "audit": ["a:b"]}})
    assert TasksConfig(family="f:F", audit=("a:b",)).audit == ("a:b",)

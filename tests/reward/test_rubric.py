"""Rubrics: weighted mean, required criteria and caps. A part that fails leaves the rubric unscored, with the part's name."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import PluginError, SandboxError, TaskError
from agentrl.protocols import SandboxBackend
from agentrl.records import Blame, Episode, Message, SandboxSpec, Score, Split, Task, Trajectory, Turn
from agentrl.reward import TaskScorer
from agentrl.reward.rubric import Rubric
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing

TASK = Task(
    id="t",
    family="f",
    prompt=(Message(role="user", content="q"),),
    tools=(),
    sandbox=SandboxSpec(image="none"),
    verifiers=("v",),
    data={},
    split=Split.TRAIN,
)
EPISODE = Episode(id="e", task_id="t", task_key="k", trajectories=())


@dataclass
class Gives:
    """A verifier that returns or raises `result`, and counts its calls."""

    result: Any
    calls: int = 0

    async def __call__(self, task: Task, episode: Episode) -> Score:
        self.calls += 1
        if isinstance(self.result, BaseException):
            raise self.result
        if self.result == "hang":
            await asyncio.sleep(60)
        return Score(value=self.result, parts={"inner": 0.25}, evidence="seen") if isinstance(self.result, float) else self.result


async def score(rubric: Rubric, sandboxes: SandboxBackend | None = None) -> Score:
    return await TaskScorer(sandboxes=sandboxes, _verifiers={"v": rubric}, max_retries=0)(TASK, EPISODE)


values = st.floats(0, 1)
weights = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(values, weights), min_size=1, max_size=5), st.floats(0.1, 10))
def test_value_is_the_weighted_mean_and_parts_are_kept(rows: list[tuple[float, float]], scale: float) -> None:
    rubric = Rubric({f"p{index}": (Gives(value), weight) for index, (value, weight) in enumerate(rows)})
    scaled = Rubric({f"p{index}": (Gives(value), scale * weight) for index, (value, weight) in enumerate(rows)})
    total, rescaled = asyncio.run(rubric(TASK, EPISODE)), asyncio.run(scaled(TASK, EPISODE))
    expected = sum(value * weight for value, weight in rows) / sum(weight for _, weight in rows)
    assert (
        total.value == pytest.approx(expected) == rescaled.value
        and min(v for v, _ in rows) - 1e-9 <= expected <= max(v for v, _ in rows) + 1e-9
    )
    assert {name: part for name, part in total.parts.items() if "/" not in name} == {f"p{n}": value for n, (value, _) in enumerate(rows)}
    assert all(total.parts[f"p{n}/inner"] == 0.25 for n in range(len(rows)))


@given(values, values, st.floats(0.01, 1))
def test_failed_requirement_scores_0_and_stops(gate: float, part: float, least: float) -> None:
    verifier = Gives(part)
    total = asyncio.run(Rubric({"part": (verifier, 1.0)}, required={"open": (Gives(gate), least)})(TASK, EPISODE))
    passed = gate >= min(least, 1 - 1e-9)
    assert total.value == (pytest.approx(part) if passed else 0.0) and verifier.calls == passed
    assert total.parts["open"] == gate and ("required criterion open fails" in total.evidence) == (not passed)


@given(values, values, values, st.floats(0.01, 1))
def test_cap_applies_only_if_its_part_is_too_low(value_a: float, value_b: float, most: float, least: float) -> None:
    parts = {"a": (Gives(value_a), 1.0), "b": (Gives(value_b), 3.0)}
    free, capped = (asyncio.run(Rubric(parts, caps=caps)(TASK, EPISODE)).value for caps in (None, {"a": (least, most)}))
    assert free is not None and capped == (min(free, most) if value_a < min(least, 1 - 1e-9) else free)


async def test_requirement_that_is_a_part_also_counts_in_the_mean() -> None:
    right, short = Gives(1.0), Gives(0.5)
    assert (await score(Rubric({"right": (right, 3.0), "short": (short, 1.0)}, required="right"))).value == 0.875
    assert right.calls == 1
    assert (await score(Rubric({"right": (Gives(0.9), 3.0), "short": (short, 1.0)}, required="right"))).value == 0.0
    assert (await score(Rubric({"right": (Gives(0.9), 1.0)}, required={"right": 0.5}))).value == 0.9


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Score(value=None, reason="no idea"), "part bad: no idea"),
        (KeyError("answer"), "part bad: verifier raised KeyError"),
        (SystemExit("enough"), "part bad: verifier raised SystemExit"),
        ("hang", "part bad: verifier returned no score within 0.05 s"),
        ("text", "part bad: verifier returned str, not a Score"),
        (1.5, "part bad: verifier returned 1.5, outside a rubric's range of 0 to 1"),
        (-0.5, "part bad: verifier returned -0.5"),
        (float("nan"), "part bad: verifier raised ValueError: Score.value: is NaN"),
        (float("inf"), "part bad: verifier returned inf instead of a finite number"),
    ],
)
async def test_missing_part_makes_the_rubric_unscored_unless_optional(result: Any, reason: str) -> None:
    parts: Any = {"good": (Gives(0.5), 1.0), "bad": (Gives(result), 9.0)}
    total = await score(Rubric(parts, part_s=0.05))
    assert total.value is None and reason in total.reason
    rest = await score(Rubric(parts, optional=("bad",), part_s=0.05))
    assert rest.value == 0.5 and rest.parts["v/bad/unscored"] == 1.0 and "bad has no value" in rest.evidence
    assert (await score(Rubric({"bad": parts["bad"]}, optional=("bad",), part_s=0.05))).value is None
    gated = await score(Rubric({"good": parts["good"]}, required={"bad": Gives(result)}, part_s=0.05))
    assert gated.value is None and reason in gated.reason


async def test_blame_and_infrastructure_faults_are_propagated() -> None:
    broken = await score(Rubric({"a": (Gives(TaskError("no truth")), 1.0)}))
    assert broken.value is None and broken.blame is Blame.TASK
    fault = Gives(SandboxError("gone"))
    total = await TaskScorer(_verifiers={"v": Rubric({"a": (fault, 1.0), "b": (Gives(1.0), 1.0)})}, max_retries=1)(TASK, EPISODE)
    assert total.value is None and total.blame is Blame.INFRASTRUCTURE and fault.calls == 2


async def test_part_may_use_sandboxes() -> None:
    class InSandboxes:
        needs_sandboxes = True

        async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
            assert sandboxes is sandboxes_of_scorer
            return Score(value=1.0)

    sandboxes_of_scorer = ScriptedSandboxes(printing(""))
    rubric = Rubric({"tests": (InSandboxes(), 1.0), "short": (Gives(0.0), 1.0)})
    assert rubric.needs_sandboxes and (await score(rubric, sandboxes_of_scorer)).value == 0.5
    assert not Rubric({"short": (Gives(0.0), 1.0)}).needs_sandboxes
    with pytest.raises(PluginError, match="needs sandboxes"):
        await score(rubric)


async def test_turn_rewards_are_weighted_like_values() -> None:
    turn = Turn(prompt_ids=(), completion_ids=(), logprobs=(), versions=(), message=TASK.prompt[0], finish_reason="stop")
    episode = replace(EPISODE, trajectories=(Trajectory(agent="main", turns=(turn, turn)),))
    rewarded = Gives(Score(value=1.0, turn_rewards=((1.0, 0.0),)))
    total = await Rubric({"a": (rewarded, 3.0), "b": (Gives(1.0), 1.0)})(TASK, episode)
    assert total.turn_rewards == ((0.75, 0.0),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": {}}, "needs parts"),
        ({"parts": {"a": (Gives(1.0), 0.0)}}, "weight of 'a' is 0.0"),
        ({"parts": {"a": (Gives(1.0), float("nan"))}}, "weight of 'a' is nan"),
        ({"parts": {"a": (Gives(1.0), 1.0)}, "required": "b"}, "there is no part 'b'"),
        ({"parts": {"a": (Gives(1.0), 1.0)}, "required": {"a": Gives(1.0)}}, "is also a part"),
        ({"parts": {"a": (Gives(1.0), 1.0)}, "caps": {"b": 0.5}}, "there is no part 'b'"),
        ({"parts": {"a": (Gives(1.0), 1.0)}, "caps": {"a": 1.5}}, "caps: the cap of 'a' is 1.5"),
        ({"parts": {"a": (Gives(1.0), 1.0)}, "optional": ("b",)}, "there is no part 'b'"),
        ({"parts": {"a": (Gives(1.0), 1.0)}, "required": "a", "optional": ("a",)}, "is both required and optional"),
        ({"parts": {"a": (3, 1.0)}}, "int is not a verifier"),
        ({"parts": {"a": ("nowhere:x", 1.0)}}, "no module named 'nowhere'"),
        ({"parts": {"a/b": (Gives(1.0), 1.0)}}, "not a valid part name"),
    ],
)
def test_invalid_rubric_raises_on_construction(arguments: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        Rubric(**arguments)


async def test_values_outside_declared_bounds_are_rejected() -> None:
    class Wide(Gives):
        bounds = (-1.0, 1.0)

    assert (await TaskScorer(_verifiers={"v": Wide(-1.0)})(TASK, EPISODE)).value == -1.0
    outside = await TaskScorer(_verifiers={"v": Wide(1.5)})(TASK, EPISODE)
    assert outside.value is None and "returned 1.5, outside its bounds -1 to 1" in outside.reason
    with pytest.raises(PluginError, match="bounds are -1 to 1"):
        Rubric({"a": (Wide(0.0), 1.0)})

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy
import pytest

from agentrl.records import (
    Blame,
    Episode,
    Failure,
    Group,
    Limits,
    Message,
    SandboxSpec,
    Score,
    Split,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    codec,
)
from agentrl.records.fields import Record

TASK = Task(
    id="t",
    family="f",
    prompt=(Message(role="user", content="q"),),
    tools=(),
    sandbox=SandboxSpec(image="i"),
    verifiers=(),
    data={},
    split=Split.TRAIN,
)


def call(value: object) -> Any:
    return ToolCall(name="f", arguments={"x": value}).arguments["x"]


def test_words_of_others_are_kept_and_half_a_surrogate_pair_becomes_a_replacement() -> None:
    said = "a\ud83d\0\u2028é\udc00b"
    kept = "a\ufffd\0\u2028é\ufffdb"
    assert Message(role="assistant", content=said).content == kept
    assert ToolResult(name="", output=said, ok=True).output == kept
    assert Score(value=1.0, evidence=said).evidence == kept
    assert Failure(stage="s", blame=Blame.POLICY, kind="k", message=said).message == kept
    assert Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=said).answer == kept


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Group(index=0, task_id="\ud800", task_key="", episodes=()), r"Group.task_id: '\\ud800' contains half of a surrogate pair"),
        (lambda: Group(index=1 << 63, task_id="", task_key="", episodes=()), "Group.index: is a number of more than 63 bits"),
        (lambda: Group(index="1", task_id="", task_key="", episodes=()), "Group.index: must be a whole number, got str"),
        (lambda: Group(index=1, task_id="", task_key="", episodes=[]), r'Group.episodes: must be a tuple, such as \("a",\), got list'),
        (lambda: Trajectory(agent="a", turns=("t",)), "Trajectory.turns: must be a Turn, got str"),
        (lambda: Episode(id="e", task_id="", task_key="", trajectories=(), outputs={"\udcff": b""}), "Episode.outputs: .* surrogate"),
        (lambda: Episode(id="e", task_id="", task_key="", trajectories=(), outputs={"a": "b"}), "Episode.outputs: must be bytes, got str"),
        (lambda: replace(TASK, split="test" * 1000), r"Task.split: must be one of train, heldout, heldout_real, got '[tes]{80}'$"),
        (lambda: replace(TASK, split=10**5000), "Task.split: must be one of train, heldout, heldout_real, got int"),
        (lambda: Score(value=float("nan")), "Score.value: is NaN"),
        (lambda: Score(value="1"), "Score.value: must be a number, got str"),
        (lambda: Score(value=10**400), "Score.value: must be a number"),
        (lambda: Score(value=1.0, parts={"a": float("nan")}), "Score.parts: is NaN"),
        (lambda: Score(value=1.0, turn_rewards=((float("nan"),),)), "turn_rewards contains NaN"),
        (lambda: Score(value=1.0, branches=(1.0, float("nan"))), "Score.branches: is NaN"),
        (lambda: Score(value=1.0, without=(None, float("nan"))), "Score.without: is NaN"),
        (lambda: Score(value=1.0, evidence=None), "Score.evidence: must be text, got NoneType"),
        (lambda: call(float("nan")), "ToolCall.arguments: 'x': nan is not a JSON number"),
        (lambda: call({"y": {"\ud800": 1}}), r"ToolCall.arguments: 'x': 'y': '\\ud800': .* surrogate"),
        (lambda: call({1, 2}), "a set is not JSON"),
        (lambda: call({1: 2}), "'x': 1: must be text, got int"),
        (lambda: call(10**4000), "more than 4000 digits"),
        (lambda: ToolResult(name="", output="", ok=1), "ToolResult.ok: must be true or false"),
        (lambda: Limits(wall_s=float("nan")), "Limits.wall_s: is NaN"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_place(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_means_the_same_is_kept_in_one_form() -> None:
    class Color(StrEnum):
        RED = "red"

    kept = call((1, numpy.float64(0.5), Color.RED, True, None))
    assert kept == [1, 0.5, "red", True, None] and [type(one) for one in kept] == [int, float, str, bool, type(None)]
    score = Score(value=numpy.float32(0.5), parts={"a": True, "b": Fraction(1, 4)})
    assert (type(score.value), score.parts) == (float, {"a": 1.0, "b": 0.25})
    assert type(Group(index=numpy.int64(3), task_id="", task_key="", episodes=()).index) is int


def test_nobody_changes_what_is_kept() -> None:
    arguments: dict[str, Any] = {"x": [1]}
    made = ToolCall(name="f", arguments=arguments)
    arguments["x"].append(object())
    assert made.arguments == {"x": [1]}


def test_a_task_of_whole_numbers_keeps_its_key_over_the_wire() -> None:
    task = replace(TASK, sandbox=SandboxSpec(image="i", cpus=2), data={"rows": (1, 2)}, limits=Limits(wall_s=60))
    assert codec.from_json(Task, codec.to_json(task)).key == task.key


def test_binary_files_are_base64() -> None:
    with pytest.raises(ValueError, match="binary file 'a' is not base64"):
        replace(TASK, binary_files={"a": "é"})


def test_a_field_that_could_hold_anything_is_no_field_of_a_record() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Loose(Record):
        anything: Any

    with pytest.raises(TypeError, match="cannot have a field of type"):
        Loose(anything=1)

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


def test_untrusted_text_is_stored_with_replacements_for_half_surrogate_pairs() -> None:
    text = "a\ud83d\0\u2028é\udc00b"
    stored = "a\ufffd\0\u2028é\ufffdb"
    assert Message(role="assistant", content=text).content == stored
    assert ToolResult(name="", output=text, ok=True).output == stored
    assert Score(value=1.0, evidence=text).evidence == stored
    assert Failure(stage="s", blame=Blame.POLICY, kind="k", message=text).message == stored
    assert Episode(id="e", task_id="t", task_key="k", trajectories=(), answer=text).answer == stored


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
def test_the_error_for_a_value_that_cannot_be_stored_names_the_field(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_equivalent_values_are_normalized() -> None:
    class Color(StrEnum):
        RED = "red"

    stored = call((1, numpy.float64(0.5), Color.RED, True, None))
    assert stored == [1, 0.5, "red", True, None] and [type(value) for value in stored] == [int, float, str, bool, type(None)]
    score = Score(value=numpy.float32(0.5), parts={"a": True, "b": Fraction(1, 4)})
    assert (type(score.value), score.parts) == (float, {"a": 1.0, "b": 0.25})
    assert type(Group(index=numpy.int64(3), task_id="", task_key="", episodes=()).index) is int


def test_later_changes_of_an_argument_do_not_change_the_record() -> None:
    arguments: dict[str, Any] = {"x": [1]}
    tool_call = ToolCall(name="f", arguments=arguments)
    arguments["x"].append(object())
    assert tool_call.arguments == {"x": [1]}


def test_a_task_with_integers_keeps_its_key_after_serialization() -> None:
    task = replace(TASK, sandbox=SandboxSpec(image="i", cpus=2), data={"rows": (1, 2)}, limits=Limits(wall_s=60))
    assert codec.from_json(Task, codec.to_json(task)).key == task.key


def test_binary_files_are_base64() -> None:
    with pytest.raises(ValueError, match="binary file 'a' is not base64"):
        replace(TASK, binary_files={"a": "é"})


def test_a_record_cannot_have_a_field_of_any_type() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Loose(Record):
        anything: Any

    with pytest.raises(TypeError, match="cannot have a field of type"):
        Loose(anything=1)

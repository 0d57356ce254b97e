from __future__ import annotations

import base64
import doctest
import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import records
from agentrl.records import (
    OUTPUT_BYTES,
    OUTPUT_FILES,
    Episode,
    Group,
    Message,
    Probe,
    Sample,
    Score,
    ScoredEpisode,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    VersionSpan,
    codec,
)
from agentrl.records.limits import OPTIONAL_FIELDS
from agentrl.records.sampling import MAX_SUPPORT, MAX_TOP_K, Sampling, Supports
from agentrl.testing.sandboxes import sample_task
from tests import strategies

TASK = sample_task(verifiers=("v:v",))


def turn(n: int, *spans: tuple[int, int, int]) -> Turn:
    return Turn(
        prompt_ids=(1,),
        completion_ids=tuple(range(n)),
        logprobs=(-1.0,) * n,
        versions=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in spans),
        message=Message(role="assistant", content="", tool_calls=(ToolCall(name="submit", arguments={"answer": 1}),)),
        finish_reason="stop",
    )


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(records).failed == 0


@given(strategies.records(Task))
def test_a_task_key_is_the_hash_of_its_fields_as_json(task: Task) -> None:
    content = asdict(task)
    content["limits"] = {name: value for name, value in content["limits"].items() if value is not None or name not in OPTIONAL_FIELDS}
    if task.environment is None:
        del content["environment"]
    else:
        del content["environment"]["pass_threshold"]
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert task.key == hashlib.sha256(text.encode()).hexdigest()


def test_task_key_depends_on_the_content() -> None:
    assert TASK.key == replace(TASK).key
    assert len({TASK.key, replace(TASK, data={"answer": "5"}).key, replace(TASK, files={"a": "b"}).key}) == 3


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_task_files_stay_inside(path: str) -> None:
    with pytest.raises(ValueError, match="leaves the working directory"):
        replace(TASK, files={path: ""})


@pytest.mark.parametrize("spans", [[(0, 0, 2)], [(0, 1, 3)], [(0, 0, 2), (1, 1, 3)], [(0, 0, 3), (1, 3, 4)], []])
def test_version_spans_must_cover_the_completion(spans: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="version spans"):
        turn(3, *spans)


def test_oldest_version_spans_all_turns() -> None:
    trajectory = Trajectory(agent="main", turns=(turn(3, (4, 0, 3)), turn(3, (2, 0, 1), (3, 1, 3))))
    assert Episode(id="e", task_id="t", task_key="k", trajectories=(trajectory,)).oldest_version == 2


def test_a_score_is_a_number_or_a_reason() -> None:
    for bad in ({"value": None}, {"value": float("nan")}):
        with pytest.raises(ValueError):
            Score(**bad)


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Sample\.logprobs"):
        Sample(
            episode_id="e",
            group_index=0,
            token_ids=(1, 2),
            loss_mask=(False, True),
            logprobs=(0.0,),
            advantages=(0.0, 1.0),
            versions=(-1, 0),
        )
    with pytest.raises(ValueError, match="Probe"):
        Probe(token_ids=((1, 2, 3),), logprobs=((-1.0,),))


def test_a_sample_has_advantages_or_rewards_and_never_both() -> None:
    rows: dict[str, Any] = {"token_ids": (1, 2), "loss_mask": (False, True), "logprobs": (0.0, -1.0), "versions": (-1, 0)}
    assert Sample(episode_id="e", group_index=0, **rows, rewards=(0.0, 1.0)).advantages == ()
    for credit, message in (
        ({"advantages": (0.0, 1.0), "rewards": (0.0, 1.0)}, "not both"),
        ({"rewards": (1.0,)}, r"Sample\.rewards has 1 entries for 2"),
        ({}, r"Sample\.advantages has 0 entries for 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Sample(episode_id="e", group_index=0, **rows, **credit)


@given(st.text(), st.floats(allow_nan=False), st.integers(min_value=0, max_value=5))
def test_groups_survive_serialization(text: str, value: float, count: int) -> None:
    trajectory = Trajectory(agent=text, turns=(turn(3, (0, 0, 3)),) * count)
    episode = Episode(id="e", task_id=text, task_key="k", trajectories=(trajectory,), answer=text)
    group = Group(index=1, task_id=text, task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=value, evidence=text)),))
    assert codec.from_json(Group, codec.to_json(group)) == group


def test_numbers_that_are_not_finite_survive_serialization() -> None:
    """Written as null, they would make the group unreadable."""
    valid = turn(3, (0, 0, 3))
    broken = replace(valid, logprobs=(float("-inf"), float("nan"), 0.0))
    decoded = codec.from_json(Turn, codec.to_json(broken))
    assert decoded.logprobs[0] == float("-inf") and decoded.logprobs[1] != decoded.logprobs[1]


def test_hostile_json_does_not_become_a_record() -> None:
    with pytest.raises(ValueError):
        codec.from_json(Group, b'{"index": "x"}')


def test_outputs_with_any_bytes_survive_json() -> None:
    outputs = {"a.bin": bytes(range(256)), "src/ü.txt": b"", "b": b"\xff\xfe+/-_"}
    episode = Episode(id="e", task_id="t", task_key="k", trajectories=(), outputs=outputs)
    group = Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=1.0)),))
    assert codec.from_json(Group, codec.to_json(group)) == group
    assert json.loads(json.dumps(codec.to_data(episode)))["outputs"].keys() == outputs.keys()


def test_outputs_are_bounded() -> None:
    with pytest.raises(ValueError, match="outputs"):
        Episode(id="e", task_id="t", task_key="k", trajectories=(), outputs={"a": bytes(OUTPUT_BYTES + 1)})
    with pytest.raises(ValueError, match="outputs"):
        Episode(id="e", task_id="t", task_key="k", trajectories=(), outputs={str(n): b"" for n in range(OUTPUT_FILES + 1)})


def test_a_sandbox_gets_text_and_binary_files() -> None:
    task = replace(TASK, files={"a": "ä"}, binary_files={"b": base64.b64encode(b"\xff").decode()})
    assert task.contents() == {"a": "ä".encode(), "b": b"\xff"}
    assert len({TASK.key, replace(TASK, outputs=("a",)).key, replace(TASK, binary_files={"b": "/w=="}).key}) == 3
    for more in ({"outputs": ("../a",)}, {"binary_files": {"/a": ""}}):
        with pytest.raises(ValueError, match="leaves the working directory"):
            replace(TASK, **more)


def test_supports_are_read_back_equal() -> None:
    supports = Supports.from_rows([(7, 3), (), (5,), (2, 11, 9), (), ()])
    assert (len(supports), supports.rows) == (6, ((3, 7), (), (5,), (2, 9, 11), (), ()))
    assert list(supports.token_ids) == [3, 7, 5, 2, 9, 11]
    assert codec.from_json(Supports, codec.to_json(supports)) == supports
    assert Supports.join([2, supports, 1]) == Supports.from_rows([(), (), *supports.rows, ()])
    assert Supports.join([2, Supports.from_rows([(), ()]), 3]) is None


@given(st.lists(st.sets(st.integers(0, (1 << 31) - 1), max_size=6), max_size=6))
def test_all_valid_supports_are_stored(rows: list[set[int]]) -> None:
    assert Supports.from_rows(rows).rows == tuple(tuple(sorted(row)) for row in rows)


@pytest.mark.parametrize(
    ("sizes", "ids"),
    [
        (b"\1\0", b""),
        (b"\1", b"\1\0\0\0"),
        (b"\1\0", b"\1\0\0"),
        (b"", b"\1\0\0\0"),
        (b"\2\0", b"\2\0\0\0\1\0\0\0"),  # decreases
        (b"\2\0", b"\1\0\0\0\1\0\0\0"),  # duplicate
        (b"\1\0\2\0", b"\5\0\0\0\2\0\0\0\1\0\0\0"),  # decreases within the second row
        (b"\1\0", b"\0\0\0\x80"),
        ((MAX_SUPPORT + 1).to_bytes(2, "little"), b"".join(n.to_bytes(4, "little") for n in range(MAX_SUPPORT + 1))),
    ],
)
def test_invalid_supports_raise(sizes: bytes, ids: bytes) -> None:
    with pytest.raises(ValueError):
        Supports(sizes=sizes, ids=ids)
    with pytest.raises(ValueError):
        Supports.from_rows([(-1,)])


def test_a_sampled_token_is_in_its_support() -> None:
    supported = replace(turn(3, (0, 0, 3)), supports=Supports.from_rows([(0, 9), (), (2,)]))
    assert codec.from_json(Turn, codec.to_json(supported)) == supported
    for rows, message in (([(0,), (2,), ()], r"token 1 \(1\) is not in its support"), ([(0,), (1,)], "3 tokens but 2 supports")):
        with pytest.raises(ValueError, match=message):
            replace(supported, supports=Supports.from_rows(rows))


def test_an_old_record_without_supports_can_be_read() -> None:
    recorded = turn(2, (0, 0, 2))
    data = json.loads(codec.to_json(recorded))
    del data["supports"]
    assert codec.from_json(Turn, json.dumps(data)) == recorded


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}),
        *({"supports": True, "top_k": top_k} for top_k in (0, MAX_TOP_K + 1)),
        {"supports": True, "top_k": 5, "temperature": 0.0},
    ],
)
def test_a_distribution_that_cannot_be_sampled_or_recorded_raises(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Sampling(**bad)

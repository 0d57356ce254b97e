"""Records read back from JSON: a file of a run, a row of the store. Every accepted record can be written and read back unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.records import (
    Batch,
    Blame,
    Completion,
    Episode,
    EpisodeState,
    ExecResult,
    Failure,
    Group,
    Message,
    Parent,
    PolicyVersion,
    Probe,
    Sample,
    SandboxSpec,
    Score,
    ScoredEpisode,
    Split,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    VersionSpan,
    codec,
)
from agentrl.records.sampling import Supports
from tests.fuzz import mutators
from tests.fuzz.mutators import join, split
from tests.fuzz.target import Check, Target, must

_TURN = Turn(
    prompt_ids=(1, 2),
    completion_ids=(3, 4),
    logprobs=(-0.5, -0.25),
    versions=(VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=2)),
    message=Message(
        role="assistant", content="é", tool_calls=(ToolCall(name="python", arguments={"code": "1", "n": [1, None, {"a": 0.5}]}),)
    ),
    finish_reason="stop",
    tool_results=(ToolResult(name="python", output="1", ok=True, wall_s=0.1),),
    supports=Supports.from_rows([(3, 7), ()]),
)
_EPISODE = Episode(
    id="e",
    task_id="t",
    task_key="k",
    trajectories=(Trajectory(agent="main", turns=(_TURN,)),),
    answer="4",
    failures=(Failure(stage="tool", blame=Blame.POLICY, kind="exec_timeout", message="slow", turn=0),),
    outputs={"a.txt": b"\xff\x00"},
)
_SCORED = ScoredEpisode(episode=_EPISODE, score=Score(value=1.0, parts={"a": 1.0}, turn_rewards=((0.5,),)))
RECORDS: Sequence[Any] = (
    Group(index=0, task_id="t", task_key="k", episodes=(_SCORED,)),
    EpisodeState(
        episode_id="e",
        task_key="k",
        attempt=0,
        trajectories=(
            Trajectory(agent="main", turns=(_TURN,), stop_reason=""),
            Trajectory(agent="helper", turns=(), parent=Parent(trajectory=0, turn=0, call=0), stop_reason=""),
        ),
        prompt_ids=((5,), ()),
        agent_state={"tools": {"notes:Notes": ["a"]}},
        snapshot=b"tar",
    ),
    PolicyVersion(number=1, parent=0, folder="versions/000001", sha256="0" * 64, evals={"heldout": 0.5}),
    Task(
        id="t",
        family="f",
        prompt=(Message(role="user", content="?"),),
        tools=("submit",),
        sandbox=SandboxSpec(image="i", network=("pypi.org:443",)),
        verifiers=("a:b",),
        data={"answer": "4"},
        split=Split.TRAIN,
        files={"a": "b"},
        binary_files={"c": "AAE="},
    ),
    Batch(
        step=0,
        samples=(
            Sample(
                episode_id="e",
                group_index=0,
                token_ids=(1, 2),
                loss_mask=(False, True),
                logprobs=(0.0, -1.0),
                advantages=(0.0, 1.0),
                versions=(-1, 0),
                supports=Supports.from_rows([(), (2, 5)]),
            ),
        ),
        denominator=1,
        group_indices=(0,),
    ),
    Probe(token_ids=((1, 2),), logprobs=((-0.5,),), next_ids=((3, 4),), next_logprobs=((-0.5, -1.0),)),
    Completion(token_ids=(1,), logprobs=(-0.5,), versions=(VersionSpan(version=0, start=0, end=1),), finish_reason="stop"),
    ExecResult(exit_code=None, stdout="a", stderr="", wall_s=0.5, reason="timeout"),
)
KINDS: Mapping[str, type[Any]] = {type(record).__name__: type(record) for record in RECORDS}


def prepare(scratch: Path) -> Check:
    def check(data: bytes) -> None:
        label, body = split(data)
        if label not in KINDS:
            return
        try:
            record = codec.from_json(KINDS[label], body)
        except ValueError:
            return
        json_text = codec.to_json(record)
        must(codec.to_json(codec.from_json(KINDS[label], json_text)) == json_text, "a record changes when it is read back")
        codec.to_data(record)

    return check


def seeds() -> Sequence[bytes]:
    return [join(type(record).__name__, codec.to_json(record)) for record in RECORDS]


target = Target(
    name="records",
    about="records read back from JSON",
    prepare=prepare,
    seeds=seeds,
    brief=50_000,
    mutate=mutators.labelled(dict.fromkeys(KINDS, mutators.json_text)),
    words=(
        b"null",
        b"NaN",
        b"Infinity",
        b"1e999",
        b'"train"',
        b'"infrastructure"',
        b"\\ud83d",
        b"18446744073709551616",
        b'"AAE="',
        b'"-_8="',
        b'"AgA="',
    ),
)

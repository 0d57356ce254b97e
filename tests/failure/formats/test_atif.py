"""ATIF: round trips, and own episodes as documents that the format's models accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from atif import Trajectory as Atif

from agentrl.errors import UserError
from agentrl.failure.formats import read_all, write
from agentrl.failure.formats.atif import document
from agentrl.failure.trace import CaptureReason, Tag, Trace
from agentrl.records import Episode, Message, Parent, Score, ToolCall, ToolResult, Trajectory, Turn, VersionSpan
from agentrl.testing.sandboxes import sample_task

DATA = Path(__file__).parent / "data"


def test_a_document_with_sub_agents_round_trips(tmp_path: Path) -> None:
    (trace,), errors = read_all(DATA / "atif.json")
    assert not errors and not trace.missing
    speakers = [entry.agent for entry in trace.spoken]
    assert speakers == ["desk"] * 3 + ["checker"] * 4 + ["desk"] + ["checker 2"] * 3 + ["checker 3"] * 4 + ["checker 2"] * 2 + ["desk"] * 2
    write([trace], tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads((DATA / "atif.json").read_text())


def test_gaps_are_described_and_no_path_is_followed() -> None:
    (trace,), _ = read_all(DATA / "atif_rich.jsonl")
    for gap in (
        "type image",
        "exact tokens",
        "cost",
        "final metrics",
        "stub-2",
        "copied",
        "sub-agent's separate trajectory",
        "its continuation",
        "time of",
    ):
        assert any(gap in missing for missing in trace.missing), gap
    assert "root:" not in str(trace)


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.iterdir() if "silent" not in path.name))
def test_every_import_is_written_as_a_valid_equal_document(name: str, tmp_path: Path) -> None:
    traces, _ = read_all(DATA / name)
    assert write(traces, tmp_path / "out.jsonl") == len(traces)
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        Atif.model_validate_json(line)
    reread, _ = read_all(tmp_path / "out.jsonl")
    for before, after in zip(traces, reread, strict=True):
        assert [(entry.message, entry.call_ids, entry.answers, entry.failed, entry.reasoning) for entry in before.spoken] == [
            (entry.message, entry.call_ids, entry.answers, entry.failed, entry.reasoning) for entry in after.spoken
        ]
        assert [entry.at_s for entry in after.spoken] == pytest.approx([entry.at_s for entry in before.spoken], abs=2e-6)
        assert len({entry.agent for entry in before.spoken}) == len({entry.agent for entry in after.spoken})


def turn(*ids: int, calls: tuple[str, ...] = (), results: tuple[str, ...] = (), logprob: float = -0.5) -> Turn:
    tool_calls = tuple(ToolCall(name=name, arguments={"n": 1}) for name in calls)
    return Turn(
        prompt_ids=ids,
        completion_ids=(7, 8),
        logprobs=(logprob, -0.25),
        versions=(VersionSpan(version=3, start=0, end=2),),
        message=Message(role="assistant", content="é<|im_end|>", tool_calls=tool_calls),
        finish_reason="stop",
        tool_results=tuple(ToolResult(name="t", output=text, ok=text != "bad") for text in results),
    )


def own_trace() -> Trace:
    """An episode with two parallel calls, one of which started a sub-agent, and a continuation in a new context."""
    task = sample_task()
    main = Trajectory(agent="main", turns=(turn(1, 2, calls=("python", "ask"), results=("bad", "fine")), turn(4, logprob=float("-inf"))))
    helper = Trajectory(
        agent="helper", turns=(turn(5),), parent=Parent(trajectory=0, turn=0, call=1), prompt=(Message(role="user", content="h"),)
    )
    later = Trajectory(agent="main", turns=(turn(6), turn(9)), parent=Parent(trajectory=0, turn=1), inherited=("e0",))
    episode = Episode(id="e1", task_id=task.id, task_key=task.key, trajectories=(main, helper, later), answer="4")
    score = Score(value=0.0, parts={"exact": 0.0})
    return Trace(id="run:../x", why=CaptureReason.FAILED, task=task, episode=episode, score=score, tags=(Tag(name="gave_up", by="rules"),))


def test_own_episodes_are_written_with_tokens_and_sub_agents() -> None:
    trace = own_trace()
    exported = Atif.model_validate(document(trace))
    assert trace.task is not None and exported.session_id == "e1"
    agent_steps = exported.steps[len(trace.task.prompt) :]
    first, last = agent_steps
    assert first.metrics is not None and last.metrics is not None
    assert (first.metrics.prompt_token_ids, first.metrics.completion_token_ids, first.metrics.logprobs) == ([1, 2], [7, 8], [-0.5, -0.25])
    assert (last.metrics.prompt_token_ids, last.metrics.logprobs) == ([1, 2, 7, 8, 4], None)  # infinity is no JSON number
    assert first.tool_calls is not None and first.observation is not None
    bad, fine = first.observation.results
    assert [bad.source_call_id, fine.source_call_id] == [call.tool_call_id for call in first.tool_calls]
    assert bad.extra is not None and bad.extra["agentrl"]["failed"] is True
    helper, later = exported.subagent_trajectories or []
    assert [ref.trajectory_id for ref in fine.subagent_trajectory_ref or []] == [helper.trajectory_id]
    assert helper.agent.name == "helper" and later.agent.name == "main" and later.extra is not None
    assert later.extra["agentrl"]["continues"] == {"trajectory_id": exported.trajectory_id, "turn": 1}
    assert [step.is_copied_context for step in later.steps][-2:] == [True, None]
    assert exported.extra is not None and exported.extra["agentrl"]["score"]["value"] == 0.0


def test_own_episodes_are_read_back_as_messages(tmp_path: Path) -> None:
    assert write([own_trace(), own_trace()], tmp_path / "out") == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run-..-x-2.json", "run-..-x.json"]
    (reread,), errors = read_all(tmp_path / "out")
    assert len(errors) == 1 and "is the same as" in errors[0].message
    assert [entry.agent for entry in reread.spoken if entry.message.role == "assistant"] == ["main", "helper", "main", "main 2", "main 2"]
    assert [entry.failed for entry in reread.spoken if entry.message.role == "tool"] == [True, False]
    assert any("exact tokens" in gap for gap in reread.missing)
    assert write([own_trace()], tmp_path / "chat.jsonl", format="openai") == 3  # a conversation for each agent and context
    with pytest.raises(UserError, match="more than one document"):
        write([own_trace()], tmp_path / "chat.json", format="openai")
    with pytest.raises(UserError, match="cannot be written"):
        write([own_trace()], tmp_path / "x", format="otel")


@pytest.mark.slow
def test_repeated_continuations_stay_at_one_level(tmp_path: Path) -> None:
    task = sample_task()
    contexts = [Trajectory(agent="main", turns=(turn(1),), parent=Parent(trajectory=at - 1, turn=0) if at else None) for at in range(300)]
    calls = turn(1, calls=("ask",), results=("fine",))
    nested = [Trajectory(agent="a", turns=(calls,), parent=Parent(trajectory=at - 1, turn=0, call=0) if at else None) for at in range(300)]
    for trajectories in (contexts, nested):
        episode = Episode(id="e", task_id=task.id, task_key=task.key, trajectories=tuple(trajectories))
        trace = Trace(id="t", why=CaptureReason.FAILED, task=task, episode=episode)
        Atif.model_validate(document(trace))
        write([trace], tmp_path / "out.json")
        (reread,), _ = read_all(tmp_path / "out.json")
        assert len({entry.agent for entry in reread.spoken}) == 300


def test_hostile_documents_end_in_an_error(tmp_path: Path) -> None:
    agent = {"name": "a", "version": "1"}
    steps = [{"step_id": 1, "source": "user", "message": "q"}]

    def nested(depth: int) -> dict[str, Any]:
        nested_document: dict[str, Any] = {"schema_version": "ATIF-v1.8", "trajectory_id": "x", "agent": agent, "steps": steps}
        return nested_document | ({"subagent_trajectories": [nested(depth - 1)]} if depth else {})

    (tmp_path / "deep.json").write_text(json.dumps(nested(60)))
    with pytest.raises(UserError, match="levels of sub-agents"):
        read_all(tmp_path / "deep.json")
    twice = nested(0) | {"subagent_trajectories": [nested(0), nested(0)]}
    (tmp_path / "twice.json").write_text(json.dumps(twice))
    (trace,), _ = read_all(tmp_path / "twice.json")
    assert [entry.agent for entry in trace.spoken] == ["a", "a 2", "a 3"] and any("missing or repeated" in gap for gap in trace.missing)
    Atif.model_validate(document(trace))

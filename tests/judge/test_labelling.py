"""Labels: transcripts of a real run, keys from standard input, hostile lines, two labellers."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.judge.labelling import run_answers
from agentrl.judge.labels import parse_item, read_labels
from agentrl.records import Episode, Message, SandboxSpec, Score, ScoredEpisode, Split, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.session.transcript import append_transcripts, transcript
from tests.commands import agentrl


def row(number: int, answer: str | None) -> dict[str, Any]:
    task = Task(
        id=f"t{number}",
        family="demo",
        prompt=(Message(role="system", content="Be brief."), Message(role="user", content=f"What is {number} + 1?")),
        tools=("python",),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=("v",),
        data={"answer": number + 1},
        split=Split.HELDOUT,
    )
    message = Message(role="assistant", content="I compute.\x1b[2J", tool_calls=(ToolCall(name="python", arguments={"code": "1\x07"}),))
    turn = Turn(
        prompt_ids=(), completion_ids=(), logprobs=(), versions=(), message=message, finish_reason="stop",
        tool_results=(ToolResult(name="python", output="2\u202e\x9b31m", ok=True),),
    )  # fmt: skip
    trajectory = Trajectory(agent="main", turns=(turn,))
    episode = Episode(id=f"e{number}", task_id=task.id, task_key=task.key, trajectories=(trajectory,), answer=answer)
    return transcript(task, ScoredEpisode(episode=episode, score=Score(value=1.0)), phase="after", step=3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    append_transcripts(tmp_path / "run" / "episodes" / "after.jsonl", [row(number, str(number + 1)) for number in range(5)])
    append_transcripts(tmp_path / "run/episodes/before.jsonl", [row(9, None), row(8, "x") | {"left_out": True}, {"question": 3}])
    with (tmp_path / "run" / "episodes" / "before.jsonl").open("ab") as file:
        file.write(b'not json\n{"half": ')
    return tmp_path / "run"


def press(monkeypatch: pytest.MonkeyPatch, run: Path, keys: str, *options: str) -> tuple[str, list[str]]:
    """The output of a labelling session, and the labels in the file."""
    monkeypatch.setattr("sys.stdin", io.StringIO(keys))
    process = agentrl("label", str(run), "--by", "anna", *options)
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in (run / "labels" / "anna.jsonl").read_text().splitlines()]
    return process.stdout, [line["label"] for line in lines]


def test_session_is_saved_after_each_key_and_resumable(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    output, labels = press(monkeypatch, run, "r\nw")
    assert labels == ["right", "wrong"] and "1 of 5" in output and "3 of 5" in output and "[q]uit" in output
    output, labels = press(monkeypatch, run, "xuws")
    assert labels == ["right", "wrong", "withdrawn", "wrong", "skip"] and "unknown key 'x'" in output and "withdrawn" in output
    output, labels = press(monkeypatch, run, "uuuuRrrrrrrr")
    assert labels[5:] == ["withdrawn"] * 3 + ["right"] * 5 and "nothing to undo" in output and "all answers are labelled" in output
    labelled = read_labels([run / "labels" / "anna.jsonl"])
    assert len(labelled) == 5 and all(item.right for item in labelled)


@pytest.mark.parametrize("content", ["my notes", '{"question": "q", "answer": "a", "label": "right"', '{"question": "q"} # a comment'])
def test_a_session_removes_no_incomplete_last_line(run: Path, content: str) -> None:
    path = run.parent / "hand.jsonl"
    path.write_text(content)
    result = agentrl("label", str(run), "--out", str(path))
    assert result.returncode == 2 and "hand.jsonl:1: the last line does not end with a line break\n  fix: " in result.stderr
    assert path.read_text() == content


def test_control_characters_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    output, _ = press(monkeypatch, run, "r")
    assert not [char for char in output if not char.isprintable() and char != "\n"]
    assert "I compute." in output and "calls python" in output and "--- reference\n" in output and "Be brief" not in output
    monkeypatch.setattr("sys.stdin", io.StringIO("q"))
    assert "--- reference" not in agentrl("label", str(run), "--by", "eve", "--blind").stdout


def test_labelled_answer_becomes_a_task_and_an_episode(run: Path) -> None:
    item = run_answers(run)[0]
    assert [answer.id for answer in run_answers(run)] == [answer.id for answer in run_answers(run)] and len(run_answers(run)) == 5
    parsed = parse_item(item.to_line())
    assert parsed == item and parsed.task().data["answer"] == str(int(item.task_id[1:]) + 1)
    (trajectory,) = parsed.episode().trajectories
    assert trajectory.turns[0].message.tool_calls[0].name == "python" and trajectory.turns[0].tool_results[0].output.startswith("2")


@pytest.mark.parametrize(
    "line",
    [
        "nonsense", "[]", "{}", '{"question": "q", "answer": "a", "label": "good"}', '{"question": "q", "answer": 3, "label": "right"}',
        '{"question": "", "answer": "a", "label": "right"}', '{"question": "q", "answer": "a", "label": "right", "messages": "x"}',
        '{"question": "q", "answer": "a", "label": "right", "data": [1]}', "[" * 100_000,
        '{"question": "q", "answer": "a", "label": "right", "messages": [{"role": "assistant", "content": {"a": 1}}]}',
    ],
    ids=range(10),
)  # fmt: skip
def test_invalid_line_is_reported(tmp_path: Path, line: str) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text('{"question": "q", "answer": "a", "label": "right"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"l\.jsonl:2"):
        read_labels([path])


def test_a_last_label_without_a_line_break_and_a_pipe_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text('{"question": "q", "answer": "a", "label": "right"}\n{"question": "q", "answer": "b", "label": "wrong"}')
    with pytest.raises(UserError, match=r"l\.jsonl:2: the last line does not end with a line break"):
        read_labels([path])
    path.write_text('{"question": "q", "answer": "a", "label": "right"}\n{"question": "q", "ans')
    assert len(read_labels([path])) == 1, "a killed process left half a line"
    path.write_text('{"question": "q", "answer": "a", "label": "right"}\n // {"question": "q"} a comment')
    with pytest.raises(UserError, match=r"l\.jsonl:2: the last line does not end with a line break"):
        read_labels([path])
    os.mkfifo(tmp_path / "pipe")
    for not_a_file in (tmp_path / "pipe", tmp_path, path / "x"):
        with pytest.raises(UserError, match=r"regular file|irectory"):
            read_labels([not_a_file])


def test_different_answers_with_one_id_keep_their_own_labels(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text('{"id": "1", "question": "q", "answer": "x", "label": "right"}\n')
    b.write_text('{"id": "1", "question": "q", "answer": "y", "label": "wrong"}\n')
    assert {labelled.item.answer: labelled.right for labelled in read_labels([a, b])} == {"x": True, "y": False}
    assert "no answer in common" in agentrl("label", "--agreement", str(a), str(b)).stderr


def write(path: Path, by: str, labels: str) -> None:
    names = {"r": "right", "w": "wrong", "s": "skip"}
    lines = [{"question": "q", "answer": f"a{number}", "label": names[label], "by": by} for number, label in enumerate(labels)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_two_labellers_are_compared_and_the_majority_counts(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(a, "anna", "r" * 25 + "w" * 25 + "s")
    write(b, "ben", "r" * 20 + "w" * 5 + "r" * 10 + "w" * 15 + "r")
    report = json.loads(agentrl("label", "--agreement", str(a), str(b), "--json").stdout)
    assert report["agreement"]["value"] == 0.7 and report["kappa"]["value"] == pytest.approx(0.4) and report["agreement"]["n"] == 50
    assert report["kappa"]["low"] < 0.4 < report["kappa"]["high"]
    text = agentrl("label", "--agreement", str(a), str(b)).stdout
    assert "only a says right 5" in text and "kappa  0.400" in text
    joined = read_labels([a, b])
    assert [item.right for item in joined].count(None) == 15 and len(joined) == 51
    write(b, "ben", "s")
    assert "no answer in common" in agentrl("label", "--agreement", str(a), str(b)).stderr


def test_with_json_the_answers_go_to_standard_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("q"))
    result = agentrl("label", str(run), "--by", "eve", "--json")
    assert json.loads(result.stdout)["right"] == 0 and "[q]uit" in result.stderr


def test_wrong_usage_is_reported(tmp_path: Path, run: Path) -> None:
    assert agentrl("label").returncode == 2 and "no episodes" in agentrl("label", str(tmp_path)).stderr
    assert "not a valid labeller name" in agentrl("label", str(run), "--by", "../eve").stderr
    assert "no answers of phase x" in agentrl("label", str(run), "--phase", "x").stderr
    assert "there is no label file" in agentrl("judge", "calibrate", "rewards.tables:exact_answer", str(tmp_path / "none.jsonl")).stderr

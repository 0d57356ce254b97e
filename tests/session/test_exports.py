"""`agentrl export` writes files for other programs: logs for inspect_ai, files for analysis, and ATIF.

If `AGENTRL_INSPECT_PYTHON` is the Python of an environment with inspect_ai, its reader opens the logs.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.experience import SqliteStore
from agentrl.experience.episode_files import load_export
from agentrl.failure.formats import read_all
from agentrl.records import (
    Blame,
    Episode,
    Failure,
    Group,
    GroupUse,
    Message,
    Parent,
    Score,
    ScoredEpisode,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    VersionSpan,
)
from agentrl.testing.store_contract import make_group

HOSTILE = "</script><script>alert(1)</script>\0\x1b[2J\u2028"


def turn(text: str, *, version: int = 3, called: bool = False) -> Turn:
    calls = (ToolCall(name="python", arguments={"code": HOSTILE}),) if called else ()
    return Turn(
        prompt_ids=(1, 2),
        completion_ids=(3, 4, 5),
        logprobs=(-0.5, float("-inf"), -0.25),
        versions=(VersionSpan(version=version, start=0, end=1), VersionSpan(version=version + 1, start=1, end=3)),
        message=Message(role="assistant", content=text, tool_calls=calls),
        finish_reason="stop",
        tool_results=(ToolResult(name="python", output=HOSTILE, ok=False),) if called else (),
        ended_at=1_700_000_000.0,
    )


def attempt(name: str, score: Score, *failures: Failure) -> ScoredEpisode:
    main = Trajectory(agent="main", turns=(turn(f"thinking {name}", called=True), turn(HOSTILE)))
    helper = Trajectory(agent="helper", turns=(turn("sub"),), parent=Parent(trajectory=0, turn=0, call=0), prompt=(PROMPT[0],))
    episode = Episode(id=name, task_id="t", task_key="k", trajectories=(main, helper), failures=failures, answer="4", wall_s=2.0)
    return ScoredEpisode(episode=episode, score=score)


PROMPT = (Message(role="system", content="Use tools."), Message(role="user", content=HOSTILE))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with groups of two steps, an open one, and an evaluation."""
    folder = tmp_path / "mine"
    folder.mkdir()
    with closing(SqliteStore(folder / "experience.sqlite")) as store:
        fault = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="exec_timeout", message="slow")
        for index in range(3):
            episodes = (
                attempt(f"g{index:06d}-0-a0", Score(value=0.5, parts={"format": 1.0}, evidence="close")),
                attempt(f"g{index:06d}-1-a0", Score(value=None, reason="left out"), fault),
            )
            store.put(Group(index=index, task_id="t", task_key="k", episodes=episodes, kind="join", prompt=PROMPT))
        store.commit(0, {0: GroupUse(tokens_trained=3)}, "c")
        store.assign(1, [1])
        heldout = (attempt("step1-heldout-00000-a0", Score(value=1.0)),)
        store.put_evaluated("step1", 1, Group(index=0, task_id="h", task_key="k", episodes=heldout, kind="join", split="heldout"))
    return folder


def export(run: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["export", str(run), "--json", *options])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def logs(folder: Path) -> dict[str, dict[str, Any]]:
    """The content of all logs: file -> member -> JSON."""
    members = {}
    for path in sorted(folder.glob("*.eval")):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            members[path.name] = {name: json.loads(archive.read(name)) for name in archive.namelist()}
    return members


def test_a_log_for_each_step_and_evaluation_has_a_sample_for_each_attempt(run: Path) -> None:
    report = export(run, "--to", "eval")
    members = logs(Path(report["folder"]))
    assert list(members) == ["evaluation-step1.eval", "train-000001.eval", "train-000002.eval", "train-open.eval"]
    assert (report["files"], report["episodes"]) == (4, 7)
    first = members["train-000001.eval"]
    header = first["header.json"]
    assert set(first) == {
        "samples/g000000_epoch_1.json",
        "samples/g000000_epoch_2.json",
        "header.json",
        "summaries.json",
        "_journal/start.json",
    }
    assert header["version"] == 2 and header["status"] == "success" and header["eval"]["task"] == "mine train-000001"
    assert header["eval"]["config"]["epochs"] == 2 and header["eval"]["dataset"]["sample_ids"] == ["g000000"]
    (score,) = header["results"]["scores"]
    assert (score["scored_samples"], score["unscored_samples"], score["metrics"]["mean"]["value"]) == (1, 1, 0.5)
    assert [(row["id"], row["epoch"], "error" in row) for row in first["summaries.json"]] == [("g000000", 1, False), ("g000000", 2, True)]


def test_a_sample_has_messages_score_and_exact_tokens(run: Path) -> None:
    members = logs(Path(export(run, "--to", "eval", "--step", "1")["folder"]))
    sample = members["train-000001.eval"]["samples/g000000_epoch_1.json"]
    assert [message["role"] for message in sample["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = sample["messages"][2]["tool_calls"]
    assert (call["function"], call["arguments"], call["id"]) == ("python", {"code": HOSTILE}, sample["messages"][3]["tool_call_id"])
    assert sample["messages"][3]["content"] == HOSTILE and sample["messages"][3]["error"]
    assert sample["scores"]["reward"]["value"] == 0.5 and sample["scores"]["reward"]["metadata"] == {"parts": {"format": 1.0}}
    exact = sample["metadata"]["agentrl"]
    main, helper = exact["trajectories"]
    assert main["turns"][0]["completion_ids"] == [3, 4, 5] and main["turns"][0]["versions"] == [[3, 0, 1], [4, 1, 3]]
    assert main["turns"][0]["logprobs"] == [-0.5, None, -0.25], "JSON has no infinity"
    assert helper["parent"] == {"trajectory": 0, "turn": 0, "call": 0} and helper["messages"][-1]["content"] == "sub"
    excluded = members["train-000001.eval"]["samples/g000000_epoch_2.json"]
    assert excluded["scores"] == {} and "exec_timeout" in excluded["error"]["message"], "an excluded episode is not a score of 0"


def test_filters_select_the_episodes_in_every_format(run: Path) -> None:
    for kind in ("parquet", "jsonl"):
        if kind == "parquet":
            pytest.importorskip("pyarrow")
        report = export(run, "--to", kind, "--outcome", "partial", "--phase", "train", "--out", str(run / "out"))
        loaded = list(load_export(Path(report["folder"]) / f"episodes.{kind}"))
        assert [exported.row.id for exported in loaded] == [f"g{index:06d}-0-a0" for index in range(3)]
        assert loaded[0].prompt == PROMPT and loaded[0].scored.score.parts == {"format": 1.0}
    report = export(run, "--to", "atif", "--exclusion", "exec_timeout", "--kind", "join")
    assert report["files"] == report["episodes"] == 3
    traces, unreadable = read_all(Path(report["folder"]))
    assert not unreadable and len(traces) == 3
    document = json.loads((Path(report["folder"]) / "g000000-1-a0.json").read_text())
    assert document["extra"]["agentrl"]["task"] == {"id": "t", "key": "k"} and document["extra"]["agentrl"]["why"] == "exported"
    assert document["steps"][2]["metrics"]["completion_token_ids"] == [3, 4, 5]
    empty = CliRunner().invoke(app, ["export", str(run), "--to", "jsonl", "--kind", "unknown"])
    assert empty.exit_code != 0 and isinstance(empty.exception, Exception) and "no episode" in str(empty.exception)


def test_a_run_without_an_index_is_indexed_by_the_command(run: Path) -> None:
    result = CliRunner().invoke(app, ["store", str(run), "--index"])
    assert result.exit_code == 0 and "always up to date" in result.stdout and not (run / "episodes.sqlite").exists()
    assert json.loads(CliRunner().invoke(app, ["store", str(run), "--index", "--json"]).stdout) == {"indexed": None}


def test_a_name_of_a_phase_cannot_leave_the_folder(run: Path) -> None:
    with closing(SqliteStore(run / "experience.sqlite")) as store:
        (scored,) = make_group(0).episodes
        scored = replace(scored, episode=replace(scored.episode, id="../../x"))
        store.put_evaluated("../../evil/\0", 1, Group(index=0, task_id="h", task_key="k", episodes=(scored,)))
    folder = Path(export(run, "--to", "eval", "--phase", "../../evil/\0")["folder"])
    (path,) = folder.iterdir()
    assert path.name == "evaluation-______evil__.eval"
    with zipfile.ZipFile(path) as archive:
        assert not any(".." in name for name in archive.namelist())


READ = """
import sys
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries
for path in sys.argv[1:]:
    log, summaries = read_eval_log(path), read_eval_log_sample_summaries(path)
    assert log.status == "success" and len(log.samples) == len(summaries) == log.results.total_samples
    for sample in log.samples:
        assert sample.metadata["agentrl"]["trajectories"][0]["turns"][0]["completion_ids"] == [3, 4, 5]
        assert sample.messages[-1].role == "assistant" and (bool(sample.scores) or sample.error is not None)
print("read", len(sys.argv) - 1)
"""


if "AGENTRL_INSPECT_PYTHON" in os.environ:

    @pytest.mark.slow
    def test_inspect_ai_reads_the_logs_and_bundles_a_viewer(run: Path) -> None:
        python = Path(os.environ["AGENTRL_INSPECT_PYTHON"])
        folder = Path(export(run, "--to", "eval")["folder"])
        read = subprocess.run([python, "-c", READ, *map(str, folder.iterdir())], capture_output=True, text=True, timeout=120)
        assert read.returncode == 0 and read.stdout.strip() == "read 4", read.stderr
        bundle = [python.with_name("inspect"), "view", "bundle", "--log-dir", folder, "--output-dir", run / "site"]
        result = subprocess.run(bundle, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        assert (run / "site" / "index.html").is_file() and len(list((run / "site" / "logs").glob("*.eval"))) == 4

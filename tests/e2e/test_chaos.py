"""The short form of the chaos suite: a real run loses its server, a rank of its learner, its driver and its disk, and is interrupted. The
checks of the suite are then shown to fail for a wrong ledger, score and process."""

from __future__ import annotations

import sqlite3
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.base.database import compress
from agentrl.chaos import CASES, Subject, run_cases
from agentrl.chaos.checks import problems
from agentrl.chaos.subject import SMALL
from agentrl.failure.collection import Collection
from agentrl.records import Score, codec

from .conftest import summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

SHORT = ("second-driver", "server-in-flight", "learner-uncommitted", "verifier-raises", "interrupted", "driver-killed", "disk-full")
SMALLER = (
    *(*SMALL, "rollout.groups_per_step=2", "rollout.group.size=4", "rollout.concurrency=16"),
    *("learner.ranks=2", "evaluation.heldout=4"),
)
SLACK = 10.0  # other tests run at the same time


@pytest.mark.usefixtures("nothing_left", "own_mounts")
def test_a_run_survives_the_loss_of_each_part_and_its_ledger_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in CASES if case.name in SHORT]
    assert len(cases) == len(SHORT)

    def examine(run: Subject) -> None:
        assert list(problems(run)) == []
        _check_summary_and_failures(run)
        monkeypatch.setattr("agentrl.chaos.checks._GONE_S", 0.0)
        _checks_detect_faults(run)

    results = run_cases(cases, work=tmp_path, backend="bubblewrap", slack=SLACK, overrides=SMALLER, examine=examine)
    assert not [(result.case, result.problem or result.skipped) for result in results if not result.ok or result.skipped]


def _check_summary_and_failures(run: Subject) -> None:
    """The failures of all sessions are captured once and counted in the report, which has one result for all sessions."""
    outcome, folder = summary(run.run_dir), run.run_dir
    assert outcome["finished"] and outcome["steps"] == run.steps
    assert outcome["heldout_after"]["n"] == 4
    assert len(outcome["sessions"]) == run.resumes + 2, "the pause on the full disk also ended a session"
    assert (folder / "model" / "model.safetensors").exists()
    with Collection(folder) as collection:
        traces = list(collection.traces())
    assert len({trace.id for trace in traces}) == len(traces) > 0
    assert all(trace.task is not None and trace.episode is not None and trace.tags for trace in traces)
    assert sum(outcome["failures"].values()) >= len(traces) and traces[0].tags[0].name in outcome["failures"]
    report = (folder / "report.html").read_text()
    assert "<h2>Failures</h2>" in report and all(tag.replace("_", " ") in report for tag in outcome["failures"])


def _checks_detect_faults(run: Subject) -> None:
    path = run.run_dir / "experience.sqlite"
    entry = next(entry for entry in run.entries() if entry.counted)
    (group,) = run.store.groups([entry.index])
    episodes = list(group.episodes)
    number = next(number for number, scored in enumerate(episodes) if scored.score.value is not None)
    episodes[number] = replace(episodes[number], score=Score(value=0.5))
    body = codec.to_json(replace(group, episodes=tuple(episodes)))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE groups SET body = ? WHERE idx = ?", (compress(body), group.index))
    assert any(f"episode {episodes[number].episode.id} has the score 0.5" in problem for problem in problems(run))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM taken WHERE idx = ?", (group.index,))
    reported = list(problems(run))
    assert any("groups were used, not" in problem for problem in reported) and any("do not add up" in problem for problem in reported)
    leftover = run.spawn(["sleep", "600"], subprocess.DEVNULL)
    try:
        time.sleep(0.2)
        assert any(f"process {leftover.pid} is still running: sleep 600" in problem for problem in problems(run))
    finally:
        leftover.kill()
        leftover.wait()
